"""Memory of a device that takes copies of its tensors, from which they are captured later.

The device tier is one slab of a device's spare memory, allocated once and cut into blocks. The barrier copies tensors
that are not captured yet there, in less than a hundredth of the time of a copy to host memory; they are captured from
there while training continues. What may change at any time is copied to a temporary block at save.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tierfall.core.image.segments import Segment
from tierfall.core.image.sources import TensorSources
from tierfall.core.runtime.memory_copies import Addresses, MemoryCopies
from tierfall.core.runtime.pinned import cut_at, locked_bounds
from tierfall.core.runtime.streams import CopyStream, StreamEvent
from tierfall.core.types.units import format_size

logger = logging.getLogger("tierfall")

ALIGNMENT_BYTES = 512
"""Alignment of a segment in a block, as of torch's own memory."""
PART_ALIGNMENT_BYTES = 16
"""Alignment of a part: the kernel copies 16 bytes at once where both ends of a copy are aligned to them."""


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

    def reserve(self, size_bytes: int) -> SlabBlock | None:
        """Take the first gap of ``size_bytes``; None where there is none."""
        needed = _aligned(max(1, size_bytes))
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
    """A range of a slab. Releasing it twice is no error. A released block refers to no slab, so that the slab's memory
    goes with its owner."""

    def __init__(self, slab: DeviceSlab, start: int, tensor: torch.Tensor) -> None:
        self._slab: DeviceSlab | None = slab
        self._start = start
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "the block was released"
        return self._tensor

    def release(self) -> None:
        slab, self._slab, self._tensor = self._slab, None, None
        if slab is not None:
            slab.return_block(self._start)


class SpillBuffer:
    """A block with the copies of several segments, in their order; released with the last of them."""

    def __init__(self, block: SlabBlock, segments: Sequence[Segment]) -> None:
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
        size_bytes = sum(map(room_of, segments))
        block = DeviceSlab(torch.empty(size_bytes, dtype=torch.uint8, device=device)).reserve(
            size_bytes
        )
        assert block is not None, "a slab has room for its size"
        return cls(block, segments)

    @classmethod
    def take_last(cls, place: int, slab: DeviceSlab, queue: deque[Segment]) -> SpillBuffer | None:
        """Take the last segments of the device ``place`` out of a queue, as many as a slab has room for. None without
        room; the queue keeps its segments then."""
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

    def copy_to(self, data: torch.Tensor, segment: Segment, stream: CopyStream) -> None:
        """Copy parts from here to their position in the image's data; called in the work of the stream."""
        memory = self._block.tensor
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
        """Undo ``take_last``. Segments in no queue would make the capture thread report an incomplete image before the
        barrier says why."""
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
