"""One rank of a training by TorchTitan's own Trainer, on the CPU: its Llama 3 of 6 million parameters, FSDP2, selective
activation checkpointing, and a fused QKV weight that a hook of ``state_dict`` splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from tests.integrations.frameworks import torchtitan_on_cpu  # noqa: F401

# isort: split
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from tests.distributed import killing
from tierfall.errors import TierfallError
from tierfall.integrations.torchtitan import TierfallManager

ROOT = Path(__file__).parents[3]
STEPS, EVERY = 24, 4
VOCABULARY, LENGTH = 2048, 32
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
RANK = int(os.environ["RANK"])


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


def trainer_config(
    folder: Path, checkpoint: Any, steps: int, replicas: int, layers: int | None
) -> Any:
    spec = model_registry("debugmodel")
    if layers is not None:
        spec.model.layers = [*spec.model.layers, spec.model.layers[-1]][:layers]
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
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=SelectiveAC.Config(),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", data_parallel_replicate_degree=replicas
        ),
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


def of_the_page(folder: Path, memory: str) -> Any:
    """Return the manager's configuration that the page makes, with its tiers below ``folder``."""
    text = (ROOT / "docs/torchtitan.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (folder / "tiers.yaml").write_text(
        config.replace("kind: host", f"kind: host, capacity: 256MiB, folder: {memory}")
    )
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(code, "the page", "exec"), names)
    return names["llama3_on_tiers"]().checkpoint


def make(folder: Path, memory: str, own: str | None, steps: int, given: dict[str, Any]) -> Any:
    """Make a Trainer with tierfall's manager, that of the page, or TorchTitan's own in the mode ``own``."""
    replicas, layers = given.pop("replicas", 1), given.pop("layers", None)
    fields = {"enable": True, "interval": EVERY, "last_save_model_only": False, **given}
    fields = {name: value for name, value in fields.items() if value is not None}
    if own == "page":
        checkpoint = of_the_page(folder, memory)
    elif own is not None:
        checkpoint = CheckpointManager.Config(async_mode=own, **fields)
    else:
        checkpoint = TierfallManager.Config(tiers=tiers(folder, memory), **fields)
    return trainer_config(folder, checkpoint, steps, replicas, layers).build()


def train(
    folder: str,
    memory: str,
    life: str = "",
    own: str | None = None,
    steps: int = STEPS,
    pause_s: float = 0.0,
    waits_at: int = 0,
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
        trainer = make(root, memory, own, steps, given)
    except TierfallError as error:
        return {"error": str(error)}
    log, logged = root / f"{life}-{RANK}", trainer.metrics_processor.log

    def note(step: int, loss: float, *args: Any, **more: Any) -> None:
        with log.open("a") as out:
            out.write(f"{step} {float(loss).hex()}\n")
        if step == waits_at:
            Event().wait()  # for the kill
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
    except (TierfallError, CheckpointException) as error:
        return {"error": "\n".join([str(error), *getattr(error, "__notes__", [])])}
    finally:
        trainer.close()
    return {"blocked_s": blocked, "weights": digest(trainer), "step": trainer.step}


def digest(trainer: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(trainer.model_parts[0].state_dict().items()):
        found.update(name.encode() + value.full_tensor().numpy().tobytes())
    return found.hexdigest()


def load(folder: str, memory: str, **given: Any) -> dict[str, Any]:
    """Load, and do not train. ``{rank}`` in a path is the number of this rank."""
    if path := given.get("initial_load_path"):
        given["initial_load_path"] = path.format(rank=RANK)
    try:
        trainer = make(Path(folder), memory, None, STEPS, given)
        found = trainer.checkpointer.load()
        trainer.close()
    except (TierfallError, CheckpointException) as error:
        return {"error": str(error)}
    return {"found": found, "step": trainer.step, "weights": digest(trainer)}


if __name__ == "__main__":
    print("ANSWER " + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
