"""The references of the part: as many bytes as the state has, copied by large copies with nothing around them."""

from __future__ import annotations

import torch

from benchmarks.bare import Buffer

COPY_BYTES = 1 << 30
"""Of each copy: far more than any cache holds."""


class Bus:
    """Page-locked host memory and two blocks on a device. Each call copies ``total_bytes`` and returns when all copies
    are enqueued."""

    def __init__(self, total_bytes: int, device: str) -> None:
        self._total_bytes = total_bytes
        size = min(COPY_BYTES, total_bytes)
        self._here = torch.ones(size, dtype=torch.uint8, device=device)
        self._there = torch.zeros_like(self._here)
        self.buffer = Buffer([self._here], touched=True)  # locked for as long as it is held

    def to_host(self) -> None:
        self._copy(self._here, self.buffer.tensors[0])

    def to_device(self) -> None:
        self._copy(self.buffer.tensors[0], self._there)

    def on_device(self) -> None:
        self._copy(self._here, self._there)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        left = self._total_bytes
        while left:
            size = min(left, source.numel())
            target[:size].copy_(source[:size], non_blocking=True)
            left -= size
