"""Real English text that lies on every machine with Python, and a shuffled loader that can be saved and restored."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


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
