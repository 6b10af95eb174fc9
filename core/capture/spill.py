"""Memory of a device that takes copies of its tensors, from which they are captured later: spare memory at the barrier,
and a temporary block for what may change at any time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from tierfall.core.image.segments import Segment
from tierfall.core.image.sources import TensorSources
from tierfall.core.image.targets import RegionTargets
from tierfall.core.runtime.memory_copies import Addresses, MemoryCopies
from tierfall.core.runtime.pinned import cut_at, locked_bounds
from tierfall.core.runtime.streams import CopyStream, StreamEvent

ALIGNMENT_BYTES = 512
"""Alignment of a segment in a block, as of torch's own memory."""
PART_ALIGNMENT_BYTES = 16
"""Alignment of a part: the kernel copies 16 bytes at once where both ends of a copy are aligned to them."""


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


class TemporaryBlock:
    """A block of torch's memory, which goes back to torch."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._memory: torch.Tensor | None = torch.empty(
            size_bytes, dtype=torch.uint8, device=device
        )

    @property
    def tensor(self) -> torch.Tensor:
        assert self._memory is not None, "a block in use has memory"
        return self._memory

    def release(self) -> None:
        self._memory = None


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
        self._filled: StreamEvent | None = None

    @property
    def place(self) -> int:
        return self._all.place

    @classmethod
    def temporary(cls, segments: Sequence[Segment], device: torch.device) -> SpillBuffer:
        """Allocate a block of torch's memory; called on the caller's stream. Raises torch.OutOfMemoryError."""
        return cls(TemporaryBlock(sum(map(room_of, segments)), device), segments)

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
            room -= room_of(segment)
            if room < 0:
                queue.append(segment)
                break
            taken.appendleft(segment)
        queue.extend(others)
        needed_bytes = sum(map(room_of, taken))
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
            self._filled = stream.mark_caller()
        finally:
            stream.wait_for_caller()

    @property
    def is_filled(self) -> bool:
        """Whether the copies to here have been made, and not only enqueued."""
        return self._filled is not None and self._filled.is_done()

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
        bounds = locked_bounds()
        for part, offset in zip(segment, offsets.tolist(), strict=True):
            source = memory[offset : offset + part.end - part.start]
            target = data[part.start : part.end]
            for start, end in cut_at(bounds, target.data_ptr(), target.numel()):
                target[start:end].copy_(source[start:end], non_blocking=True)

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


def room_of(segment: Segment) -> int:
    """The bytes that a segment takes in a block."""
    return _aligned(int(_part_rooms(segment).sum()))


def _part_rooms(segment: Segment) -> Addresses:
    mask = np.uint64(PART_ALIGNMENT_BYTES - 1)
    found: Addresses = (segment.columns[2] + mask) & ~mask
    return found


def _offsets(joined: Segment, segments: Sequence[Segment]) -> Addresses:
    """The offset of each part in the block."""
    parts = _part_rooms(joined)
    rooms = np.array([*map(room_of, segments)], dtype=np.uint64)
    lengths = [*map(len, segments)]
    firsts = np.cumsum([0, *lengths[:-1]])
    before = np.cumsum(parts) - parts
    gaps = (np.cumsum(rooms) - rooms) - before[firsts]
    found: Addresses = before + np.repeat(gaps, lengths)
    return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
