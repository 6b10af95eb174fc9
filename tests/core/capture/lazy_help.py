"""Training in small, and a capture thread that stands still when a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.handle import SaveHandle

MakeConfig = Callable[..., dict[str, Any]]
PATIENCE_S = 20.0


class Held:
    """The capture thread, standing still before it has copied anything, for as long as ``free`` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.free = threading.Event()
        self.fillings: list[ImageCopier] = []
        original = ImageCopier.run

        def run(filling: ImageCopier) -> None:
            self.fillings.append(filling)
            self.arrived.set()
            assert self.free.wait(PATIENCE_S)
            original(filling)

        monkeypatch.setattr(ImageCopier, "run", run)

    def hold(self) -> None:
        self.free.clear()
        self.arrived.clear()


class Trainer:
    """A small model in training, and copies of what it was."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 100), torch.nn.Linear(100, 40))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(4, 40)).pow(2).mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scaled_step(self, scaler: torch.amp.GradScaler, *, overflow: bool) -> None:
        """Step as a loop with a scaler does, which leaves the step out where gradients overflowed."""
        scaler.scale(self.model(torch.randn(4, 40)).pow(2).mean()).backward()
        if overflow:
            self.model[0].weight.grad[0, 0] = float("inf")  # type: ignore[index, union-attr]
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def now(self) -> dict[str, torch.Tensor]:
        """Every bit that a step changes."""
        found = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": v.clone() for k, v in moments.items()}
        return found


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What a tier holds of a step, named as ``Trainer.now`` does."""
    loaded = tierfall.load(folder, step=step)
    found = {f"model.{k}": v for k, v in loaded["model"].items()}
    for number, moments in loaded["optimizer"]["state"].items():
        found |= {f"optimizer.{number}.{k}": v for k, v in moments.items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def lazy_save(
    ckpt: tierfall.Checkpointer, trainer: Trainer, step: int, **options: Any
) -> SaveHandle:
    handle = ckpt.save(step, trainer.state, **options)
    assert handle.stats.lazy
    return handle


def warmed_up(ckpt: tierfall.Checkpointer, trainer: Trainer) -> None:
    """The first save captures blocking; after it a step is seen."""
    trainer.step()
    assert not ckpt.save(1, trainer.state, block=True).stats.lazy
    trainer.step()
