"""The training: a loop without tierfall, and the few lines that tierfall adds.

Every random generator is seeded and the number of threads is fixed, so that two runs have bit-identical losses. Its
data is English text that every installation of Python has.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tierfall
from tierfall.demo.model import Gpt, Shape, next_byte_loss

SEED = 1234
THREADS = 1
LEARNING_RATE = 1e-3


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


def english_text() -> bytes:
    """Return Python's own help texts, half a million bytes or so, in a steady order."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class ShuffledLoader:
    """Hands out batches of blocks of ``text`` in an order drawn anew for each epoch.

    Its state is three numbers: the epoch, the position in it, and the seed that every permutation is drawn from.
    """

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        blocks = len(text) // (context + 1)
        if blocks < batch:
            raise ValueError(f"ShuffledLoader: {len(text)} bytes of text make no batch of {batch}")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._blocks = data[: blocks * (context + 1)].view(blocks, context + 1)
        self._batch = batch
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._draw()

    def _draw(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(len(self._blocks), generator=generator)

    def next_batch(self) -> Tensor:
        """Return the next (batch, context + 1) bytes as int64; an epoch's rest that makes no batch is left out."""
        if self._position + self._batch > len(self._blocks):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._draw()
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return self._blocks[chosen].long()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed = state["seed"]
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._draw()


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

    def step(self) -> Tensor:
        """Train on one batch, and return its loss."""
        loss = next_byte_loss(self.model, self.loader.next_batch())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()  # waits for what a save has not copied yet
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step, its loss, and the seconds that it took with everything."""

    step: int
    loss: float
    seconds: float


def train(
    training: Training,
    *,
    first: int,
    last: int,
    ckpt: tierfall.Checkpointer | None,
    pace_s: float = 0.0,
) -> Iterator[Trained]:
    """Train steps ``first`` to ``last``, both included, saving through ``ckpt`` where its cadence asks for it.

    A step that took less than ``pace_s`` is followed by a pause, which counts as nobody's time.
    """
    for step in range(first, last + 1):
        began = time.monotonic()
        loss = training.step()
        if ckpt is not None:
            ckpt.maybe_save(step, training.state, metrics={"loss": loss})
        value = loss.item()
        yield Trained(step=step, loss=value, seconds=time.monotonic() - began)
        time.sleep(max(0.0, began + pace_s - time.monotonic()))
