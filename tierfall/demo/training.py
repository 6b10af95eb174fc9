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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step, its loss, and the seconds that it took with everything; with the handle of its save, if it was saved.

    ``save`` was called at ``saved_s`` on the monotonic clock.
    """

    step: int
    loss: float
    seconds: float
    saved_s: float
    handle: tierfall.SaveHandle | None


Listener = Callable[[Trained], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A size of the demo: the model, its batches, and what of the chain has to fit to them.

    From save to save a trainer takes ``apart_s`` at least, on the fastest machine: a flush to the object tier, at its
    bandwidth, takes about one and a half times as long, so that there is one to kill.
    """

    shape: Shape
    batch: int
    store_bandwidth: str
    chunk: str
    apart_s: float


NORMAL = Plan(
    shape=Shape(width=256, layers=4, heads=4, context=64),
    batch=4,
    store_bandwidth="30MB/s",
    chunk="1MiB",
    apart_s=0.8,
)
SMALL = Plan(
    shape=Shape(width=96, layers=2, heads=2, context=64),
    batch=2,
    store_bandwidth="10MB/s",
    chunk="256KiB",
    apart_s=0.25,
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
    pace_s: float = 0.0,
) -> None:
    """Train steps ``first`` to ``last``, both included, saving through ``ckpt`` where its cadence asks for it.

    A step that took less than ``pace_s`` is followed by a pause, which counts as nobody's time.
    """
    for step in range(first, last + 1):
        began = time.monotonic()
        loss = training.step()
        saved_s = time.monotonic()
        handle = None
        if ckpt is not None:
            handle = ckpt.maybe_save(step, training.state, metrics={"loss": loss})
        value = loss.item()
        told(
            Trained(
                step=step,
                loss=value,
                seconds=time.monotonic() - began,
                saved_s=saved_s,
                handle=handle,
            )
        )
        time.sleep(max(0.0, began + pace_s - time.monotonic()))
