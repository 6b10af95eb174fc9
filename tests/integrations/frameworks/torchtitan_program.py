"""One rank of a training by TorchTitan's own Trainer, on the CPU: its Llama 3 of 6 million parameters, FSDP2, selective
activation checkpointing, and a fused QKV weight that a hook of ``state_dict`` splits.

TorchTitan has no CPU build. ``on_cpu`` replaces what it calls of a GPU: the name of the device, its memory statistics, a
barrier. Its FlexAttention has no backward pass on a CPU, so the model has TorchTitan's own SDPA attention.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

STEPS, EVERY = 24, 4
VOCABULARY, LENGTH = 2048, 32
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test has the store
RANK = int(os.environ["RANK"])


def on_cpu() -> None:
    """Let TorchTitan run without a GPU. Call it before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    torch.cpu.memory_stats = lambda *_: {}  # type: ignore[attr-defined]
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**40)  # type: ignore[attr-defined]
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_after_sum  # type: ignore[method-assign]
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None


on_cpu()
torch.set_num_threads(1)

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.distributed import killing  # noqa: E402
from tierfall.errors import ConfigError, TierfallError  # noqa: E402
from tierfall.integrations.torchtitan import TierfallManager  # noqa: E402


class Tokens(IterableDataset):  # type: ignore[type-arg]
    """Token sequences that are drawn from the process's random state, so that it counts."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, 0

    def __iter__(self) -> Any:
        while True:
            self.seen += 1
            row = torch.randint(VOCABULARY, (LENGTH + 1,))
            row[0] = (self.rank + self.seen) % VOCABULARY
            yield {"input": row[:-1], "positions": torch.arange(LENGTH)}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **given: Any) -> None:
        places = {"dp_rank": given["dp_rank"], "dp_world_size": given["dp_world_size"]}
        super().__init__(Tokens(given["dp_rank"]), batch_size=given["local_batch_size"], **places)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    decode = encode

    def get_vocab_size(self) -> int:
        return VOCABULARY


def trainer_config(folder: Path, checkpoint: Any) -> Any:
    spec = model_registry("debugmodel")
    for _, attention, parent, name in spec.model.traverse(FlexAttention.Config):
        del attention
        setattr(parent, name, ScaledDotProductAttention.Config())
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        dump_folder=str(folder),
        optimizer=replace(default_adamw(lr=8e-4), implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=SelectiveAC.Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=checkpoint,
        debug=DebugConfig(seed=1),
    )


def tiers(folder: Path, memory: str) -> str:
    """Write tierfall's configuration, and return its path."""
    host = {"name": "memory", "kind": "host", "folder": memory, "capacity": "256MiB"}
    disk = {"name": "disk", "kind": "file", "path": str(folder / "disk")}
    path = folder / f"tiers-{RANK}.yaml"
    path.write_text(json.dumps({"run": "titan", "max_wait": "30s", "tiers": [host, disk]}))
    return str(path)


def make(folder: Path, memory: str, own: str | None, given: dict[str, Any]) -> Any:
    """Make a Trainer with tierfall's manager, or with TorchTitan's own in the mode ``own``."""
    fields = {"enable": True, "interval": EVERY, "last_save_model_only": False, **given}
    if own is not None:
        checkpoint = CheckpointManager.Config(async_mode=own, **fields)
    else:
        checkpoint = TierfallManager.Config(tiers=tiers(folder, memory), **fields)
    return trainer_config(folder, checkpoint).build()


def train(
    folder: str,
    memory: str,
    life: str = "",
    own: str | None = None,
    pause_s: float = 0.0,
    point: str = "",
    call: int = 1,
    victim: int = 0,
    **given: Any,
) -> dict[str, Any]:
    """Train to the end, from what is there; or die at a call of a point of tierfall. Each loss is noted exactly."""
    if point and victim == RANK:
        killing.at_point(point, call, killing.kill_self)
    root = Path(folder)
    try:
        trainer = make(root, memory, own, given)
    except ConfigError as error:
        return {"error": str(error)}
    log, logged = root / f"{life}-{RANK}", trainer.metrics_processor.log

    def note(step: int, loss: float, *args: Any, **more: Any) -> None:
        with log.open("a") as out:
            out.write(f"{step} {float(loss).hex()}\n")
        time.sleep(pause_s)
        logged(step, loss, *args, **more)

    trainer.metrics_processor.log = note
    save, blocked = trainer.checkpointer.save, []

    def timed(step: int, **more: Any) -> Any:
        begin = time.perf_counter()
        saved = save(step, **more)
        if saved:
            blocked.append(time.perf_counter() - begin)
        return saved

    trainer.checkpointer.save = timed
    try:
        trainer.train()
    except (TierfallError, CheckpointException, AssertionError) as error:
        return {"error": str(error)}
    finally:
        trainer.close()
    weights = hashlib.sha256()
    for name, value in sorted(trainer.model_parts[0].state_dict().items()):
        weights.update(name.encode() + value.full_tensor().numpy().tobytes())
    return {"blocked_s": blocked, "weights": weights.hexdigest(), "step": trainer.step}


if __name__ == "__main__":
    print("ANSWER " + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
