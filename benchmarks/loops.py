"""One training loop of a framework in a process of its own: ``python -m benchmarks.loops FRAMEWORK WAY FOLDER MEMORY
LAYERS`` prints the seconds between the forward passes as JSON.

The model is the same in each framework. WAY is ``none`` (no checkpoint), ``own`` (the framework's own), ``async``
(Lightning's AsyncCheckpointIO), or ``tierfall``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tierfall

STEPS = 25
EVERY = 4
TOKENS = 64
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
}
FLOAT_BYTES = 12
"""A weight and the two moments of Adam."""
LAYER_PARAMETERS = 4 * 512**2 + 3 * 512 * 1536
OTHER_PARAMETERS = 2 * 4096 * 512


def layers_for(size_bytes: int) -> int:
    """Return how many layers give the model a state of about so many bytes, at least one."""
    return max(1, round((size_bytes / FLOAT_BYTES - OTHER_PARAMETERS) / LAYER_PARAMETERS))


class Clock:
    """A Llama model, and when each of its forward passes began."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        package = import_module("transformers")
        shape = package.LlamaConfig(**SHAPE, num_hidden_layers=layers)
        self.model: Any = package.LlamaForCausalLM(shape)
        self.forwards_s: list[float] = []
        self.model.register_forward_pre_hook(lambda *_: self.forwards_s.append(time.perf_counter()))

    @property
    def steps_s(self) -> list[float]:
        """The seconds from the beginning of each training step to that of the next."""
        began_s = self.forwards_s[:STEPS]
        return [after - before for before, after in pairwise(began_s)]


def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, SHAPE["vocab_size"], (2 * STEPS, TOKENS))
    return [{"input_ids": row, "labels": row} for row in ids]


def config(folder: Path, memory: Path) -> dict[str, Any]:
    """Return the tiers: host memory for two images, and a folder that keeps one checkpoint, as the others do."""
    return {
        "run": "loop",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(memory), "capacity": "1.5GiB"},
            {"name": "disk", "kind": "file", "path": str(folder), "retain": {"last": 1}},
        ],
    }


def transformers_loop(model: Any, way: str, folder: Path, memory: Path) -> None:
    package = import_module("transformers")
    arguments = package.TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="no" if way == "none" else "steps",
        save_steps=EVERY,
        save_total_limit=1 if way == "own" else None,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = package.Trainer(model=model, args=arguments, train_dataset=rows())
    with ExitStack() as stack:
        if way == "tierfall":
            ckpt = stack.enter_context(tierfall.open(config(folder, memory)))
            import_module("tierfall.integrations.transformers").attach(trainer, ckpt)
        trainer.train()


def lightning_loop(model: Any, way: str, folder: Path, memory: Path) -> None:
    package = import_module("lightning.pytorch")

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    plugins = {
        "async": lambda: import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO(),
        "tierfall": lambda: import_module("tierfall.integrations.lightning").TierfallIO(
            config(folder, memory)
        ),
    }
    plugin = [plugins[way]()] if way in plugins else []
    saves = package.callbacks.ModelCheckpoint(
        dirpath=folder / "out", every_n_train_steps=EVERY, save_top_k=1
    )
    trainer = package.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=way != "none",
        plugins=plugin,
        callbacks=[*(plugin if way == "tierfall" else []), *([] if way == "none" else [saves])],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=2))


def deepspeed_loop(model: Any, way: str, folder: Path, memory: Path) -> None:
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    package = import_module("deepspeed")
    package.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine = package.initialize(
        model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
    )[0]
    with ExitStack() as stack:
        if way == "tierfall":
            ckpt = stack.enter_context(tierfall.open(config(folder, memory)))
            import_module("tierfall.integrations.deepspeed").TierfallEngine(engine, ckpt)
            engine.load_checkpoint(None)
        for step, batch in enumerate(torch.utils.data.DataLoader(rows(), batch_size=2), 1):
            engine.backward(engine(**batch).loss)
            engine.step()
            if way != "none" and step % EVERY == 0:
                # One name, so that DeepSpeed keeps one checkpoint too.
                tag = None if way == "tierfall" else "last"
                engine.save_checkpoint(None if way == "tierfall" else folder / "out", tag)


LOOPS: dict[str, tuple[Callable[[Any, str, Path, Path], None], tuple[str, ...]]] = {
    "transformers": (transformers_loop, ("none", "own", "tierfall")),
    "lightning": (lightning_loop, ("none", "own", "async", "tierfall")),
    "deepspeed": (deepspeed_loop, ("none", "own", "tierfall")),
}
MODULES = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning", "transformers"),
    "deepspeed": ("deepspeed", "transformers"),
}


def main(framework: str, way: str, folder: str, memory: str, layers: str) -> None:
    clock = Clock(int(layers))
    LOOPS[framework][0](clock.model, way, Path(folder), Path(memory))
    print(json.dumps({"steps_s": clock.steps_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
