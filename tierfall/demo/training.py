"""The training itself: what a user has before tierfall comes, and the few lines that tierfall adds.

Every source of chance is seeded and the number of threads is fixed, so that two runs give the same losses to the last
bit. It writes no files; what happened is told to a ``Listener``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tierfall
from tierfall.demo.data import ShuffledLoader
from tierfall.demo.model import Gpt, Shape, next_byte_loss

SEED = 1234
THREADS = 1
LEARNING_RATE = 1e-3

Listener = Callable[[int, float, float], None]
"""Is told a step, its loss, and the seconds that it took with everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A size of the demo: the model, its batches, and what of the chain has to fit to them."""

    shape: Shape
    batch: int
    slow_bandwidth: str
    chunk: str


NORMAL = Plan(
    shape=Shape(width=256, layers=4, heads=4, context=64),
    batch=4,
    slow_bandwidth="30MB/s",
    chunk="1MiB",
)
SMALL = Plan(
    shape=Shape(width=96, layers=2, heads=2, context=64),
    batch=2,
    slow_bandwidth="10MB/s",
    chunk="256KiB",
)


def make_deterministic() -> None:
    """Fix what this process could do differently from another: threads, kernels, the random state."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)


class Training:
    """A model, its optimizer, its learning rate and its data. ``state`` is what a checkpoint is to hold."""

    def __init__(self, plan: Plan, text: bytes, *, steps: int) -> None:
        self.model = Gpt(plan.shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps + 1, cycle_momentum=False
        )
        self.loader = ShuffledLoader(text, context=plan.shape.context, batch=plan.batch, seed=SEED)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def step(self) -> torch.Tensor:
        """Train on one batch, and return its loss."""
        loss = next_byte_loss(self.model, self.loader.next_batch())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()  # waits for what a save has not copied yet
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss


def train(
    training: Training,
    *,
    first: int,
    last: int,
    ckpt: tierfall.Checkpointer | None,
    told: Listener,
) -> None:
    """Train steps ``first`` to ``last``, both included, saving through ``ckpt`` where its cadence asks for it."""
    for step in range(first, last + 1):
        began = time.monotonic()
        loss = training.step()
        if ckpt is not None:
            ckpt.maybe_save(step, training.state, metrics={"loss": loss})
        told(step, loss.item(), time.monotonic() - began)
