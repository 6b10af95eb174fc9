"""The device tier: one slab of a device's spare memory, allocated once and cut into blocks.

It stores no checkpoint. The barrier copies tensors that are not captured yet to the slab, in less than a hundredth of
the time of a copy to host memory; they are captured from the slab while training continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import torch

from tierfall.core.capture.spill import ALIGNMENT_BYTES
from tierfall.core.types.units import format_size

logger = logging.getLogger("tierfall")


class DeviceSlab:
    """Memory on one device. Thread-safe: one thread may take a block and another release it."""

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory`` is flat uint8."""
        self._memory = memory
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    @classmethod
    def allocate(cls, capacity_bytes: int, device: torch.device, *, name: str) -> DeviceSlab | None:
        """Allocate memory of a device for tier ``name``; None, and a warning, where that fails."""
        try:
            return cls(torch.empty(capacity_bytes, dtype=torch.uint8, device=device))
        except RuntimeError as error:  # torch's out-of-memory error is a subclass
            logger.warning(
                "save: goes on without tier %s: %s cannot allocate %s (%s)",
                name,
                device,
                format_size(capacity_bytes),
                str(error).splitlines()[0],
            )
            return None

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self._memory.numel() - sum(self._taken.values())

    def reserve(self, size_bytes: int) -> SlabBlock | None:
        """Take the first gap of ``size_bytes``; None where there is none."""
        needed = max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        with self._lock:
            start = next((at for at, length in self._gaps() if length >= needed), None)
            if start is None:
                return None
            self._taken[start] = needed
        return SlabBlock(self, start, self._memory[start : start + size_bytes])

    @property
    def largest_free_bytes(self) -> int:
        """The largest block that ``reserve`` would return."""
        with self._lock:
            most = max((length for _, length in self._gaps()), default=0)
        return most // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Start and length of each free range. The caller holds the lock."""
        start = 0
        for taken, length in sorted(self._taken.items()):
            yield start, taken - start
            start = taken + length
        yield start, self._memory.numel() - start

    def return_block(self, start: int) -> None:
        with self._lock:
            self._taken.pop(start, None)


class SlabBlock:
    """A range of a slab. Releasing it twice is no error."""

    def __init__(self, slab: DeviceSlab, start: int, tensor: torch.Tensor) -> None:
        self._slab = slab
        self._start = start
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "the block was released"
        return self._tensor

    def release(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            self._slab.return_block(self._start)
