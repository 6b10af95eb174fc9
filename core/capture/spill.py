"""Spare memory of a device that takes tensors at the barrier, and from which they are captured later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tierfall.core.image.segments import Segment
from tierfall.core.image.sources import TensorSources
from tierfall.core.image.targets import RegionTargets
from tierfall.core.runtime.memory_copies import MemoryCopies
from tierfall.core.runtime.streams import CopyStream

ALIGNMENT_BYTES = 512
"""Alignment at which device kernels copy at full speed."""


class SpareBlock(Protocol):
    """A block of a slab, in use until ``release``."""

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, flat uint8."""
        ...

    def release(self) -> None:
        """May be called twice."""
        ...


class Slab(Protocol):
    """Spare memory of one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def largest_free_bytes(self) -> int:
        """The size of the largest free block."""
        ...

    def reserve(self, size_bytes: int) -> SpareBlock | None:
        """Allocate a block; None if no free block is large enough."""
        ...


class SpillBuffer:
    """A block with the copies of several segments, in their order; released with the last of them."""

    def __init__(self, block: SpareBlock, segments: Sequence[Segment]) -> None:
        self._block = block
        self._left_bytes = sum(each.size_bytes for each in segments)
        self._lock = threading.Lock()
        self._all = segments[0].joined(segments[1:])
        self._offsets = _offsets(self._all, segments)
        self._by_start = np.argsort(self._all.columns[1])  # parts of batches are out of order
        self.segments = deque(segments)
        """Those whose copy to host memory is not claimed yet."""

    @property
    def place(self) -> int:
        return self._all.place

    @classmethod
    def take_last(cls, place: int, slab: Slab, queue: deque[Segment]) -> SpillBuffer | None:
        """Take the last segments of the device ``place`` out of a queue, as many as a slab has room for. None, and the
        queue is as before, if there is no room."""
        room, taken, others = slab.largest_free_bytes, deque[Segment](), deque[Segment]()
        while queue:
            segment = queue.pop()
            if segment.place != place:
                others.appendleft(segment)
                continue
            room -= _aligned(segment.size_bytes)
            if room < 0:
                queue.append(segment)
                break
            taken.appendleft(segment)
        queue.extend(others)
        needed_bytes = sum(_aligned(segment.size_bytes) for segment in taken)
        block = slab.reserve(needed_bytes) if taken else None
        if block is None:
            queue.extend(taken)
            return None
        return cls(block, [*taken])

    def fill(self, sources: TensorSources, stream: CopyStream) -> None:
        """Copy all segments here on the caller's stream. What ``stream`` enqueues from now on runs after that."""
        try:
            stream.run_on_caller_stream(
                lambda: sources.copy_within(self._all, self._block.tensor, self._offsets, stream)
            )
        finally:
            stream.wait_for_caller()

    def copy_to(self, targets: RegionTargets, segment: Segment, stream: CopyStream) -> None:
        """Copy parts from here to their position in the region; called in the work of the stream."""
        memory, data = self._block.tensor, targets.data
        _, starts, sizes, _ = segment.columns
        at = np.searchsorted(self._all.columns[1], starts, sorter=self._by_start)
        offsets = self._offsets[self._by_start[at]]
        if stream.copies_memory(data):
            to, of = np.uint64(data.data_ptr()), np.uint64(memory.data_ptr())
            stream.copy_memory(MemoryCopies(to + starts, of + offsets, sizes))
            return
        for part, offset in zip(segment, offsets.tolist(), strict=True):
            source = memory[offset : offset + part.end - part.start]
            data[part.start : part.end].copy_(source, non_blocking=True)

    def release(self, segment: Segment) -> None:
        """Release the room of a segment, or of several as one."""
        with self._lock:
            self._left_bytes -= segment.size_bytes
            if self._left_bytes == 0:
                self._block.release()

    def discard(self) -> None:
        """Release the room of all segments that are not claimed."""
        while self.segments:
            self.release(self.segments.popleft())

    def move_back(self, queue: deque[Segment]) -> None:
        """Undo ``take_last``. In no queue, they would make the capture thread report an incomplete image, before the
        barrier reports why."""
        queue.extend(self.segments)
        self.discard()

    def close(self) -> None:
        """Release all room, once nothing reads from here any more: an interrupt may have lost claimed segments."""
        self.segments.clear()
        self._block.release()


def _offsets(joined: Segment, segments: Sequence[Segment]) -> NDArray[np.uint64]:
    """The offset of each part in the block: each segment begins at a multiple of ALIGNMENT_BYTES."""
    sizes = np.array([each.size_bytes for each in segments], dtype=np.uint64)
    rooms = np.array([_aligned(each.size_bytes) for each in segments], dtype=np.uint64)
    gaps = (np.cumsum(rooms) - rooms) - (np.cumsum(sizes) - sizes)
    parts = joined.columns[2]
    found: NDArray[np.uint64] = np.cumsum(parts) - parts + np.repeat(gaps, [*map(len, segments)])
    return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
