"""A training by DeepSpeed on the CPU: one process for each rank, which the test may kill.

``deepspeed_program.py METHOD ARGUMENTS`` (JSON). Each rank appends to a file of its own: losses by step, and how much
of each save was captured lazily.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from threading import Event
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # type: ignore[import-not-found]
import deepspeed.runtime.zero.muon.original_muon  # of the first engine
import torch
from torch import nn

import tierfall
from tierfall.integrations.deepspeed import TierfallEngine

STEPS = 24
EVERY = 4
# An extension for inference on the CPU alone, which DeepSpeed would compile for half a minute in a first process group.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)


class Model(nn.Module):
    """With dropout, so that the random state counts, and a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.Dropout(0.2), nn.Linear(1024, 64))
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1  # type: ignore[operator]
        result: torch.Tensor = self.layers(x.to(torch.bfloat16)).float().pow(2).mean()
        return result


def settings(stage: int, *, universal: bool = False) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }


def make_engine(stage: int, **options: Any) -> Any:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    model = Model()
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(stage, **options)
    )[0]


class Program:
    def __init__(self, stage: int, config: dict[str, Any], folder: Path) -> None:
        self.stage = stage
        self.config = config
        self.folder = folder

    def report(self, *values: object) -> None:
        with open(self.folder / f"rank{os.environ['RANK']}", "a") as log:
            print(json.dumps(values), file=log)

    def train(self, waits_at: int = 0) -> None:
        """Train; wait after the step ``waits_at`` for the kill."""
        engine = make_engine(self.stage)
        with tierfall.open(self.config) as ckpt:
            saver = TierfallEngine(engine, ckpt)
            _, client_state = engine.load_checkpoint(None)
            if client_state is not None:
                assert client_state["seen"] == 4 * engine.global_steps
            for step in range(engine.global_steps + 1, STEPS + 1):
                loss = engine(torch.randn(4, 64))
                engine.backward(loss)
                engine.step()
                self.report("loss", step, loss.item().hex())
                if step % EVERY == 0:
                    engine.save_checkpoint(None, client_state={"seen": 4 * step})
                    assert saver.handle is not None
                    stats = saver.handle.stats
                    self.report("lazy", step, stats.lazy_bytes / stats.bytes)
                if step == waits_at:
                    Event().wait()

    def save_alone(self) -> None:
        """Make a call on rank 0 that all ranks should make."""
        engine = make_engine(self.stage)
        with tierfall.open({**self.config, "max_wait": "2s"}) as ckpt:
            TierfallEngine(engine, ckpt)
            for _ in range(2):
                engine.backward(engine(torch.randn(4, 64)))
                engine.step()
                if os.environ["RANK"] == "0":
                    engine.save_checkpoint(None)

    def load(self, *tags: str) -> None:
        """Load a step by the first known tag, and write DeepSpeed's own files of it."""
        engine = make_engine(self.stage)
        with tierfall.open(self.config) as ckpt:
            saver = TierfallEngine(engine, ckpt)
            for tag in tags:
                try:
                    engine.load_checkpoint(None, tag=tag)
                except tierfall.errors.RestoreError as error:
                    self.report("refused", str(error))
                else:
                    saver.export(self.folder / "exported")
                    self._report_weights(engine)

    def load_exported(self) -> None:
        engine = make_engine(self.stage)
        with tierfall.open({**self.config, "run": "begun"}) as ckpt:
            TierfallEngine(engine, ckpt)
            engine.load_checkpoint(str(self.folder / "exported"))
            self._report_weights(engine)
            engine.save_checkpoint(None)

    def load_universal(self) -> None:
        engine = make_engine(self.stage, universal=True)
        with tierfall.open({**self.config, "run": "resized"}) as ckpt:
            TierfallEngine(engine, ckpt)
            engine.load_checkpoint(str(self.folder), tag="universal")
        self._report_weights(engine)

    def _report_weights(self, engine: Any) -> None:
        engine.eval()
        torch.manual_seed(0)
        self.report("step", engine.global_steps, engine(torch.randn(4, 64)).item().hex())


if __name__ == "__main__":
    _, method, text = sys.argv
    given = json.loads(text)
    program = Program(given["stage"], given["config"], Path(given["folder"]))
    print("ANSWER", json.dumps(getattr(program, method)(*given["arguments"])), flush=True)
