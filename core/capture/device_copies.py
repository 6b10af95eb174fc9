"""The devices of a state's tensors, and asynchronous copies from them: launched and completed in order, with a bound on
the bytes in flight."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import torch

from tierfall.core.image.segments import HOST, Segment
from tierfall.core.runtime.streams import CopyStream, StreamEvent, Streams

_IS_CPU = attrgetter("is_cpu")
FLYING_BYTES_MAX = 256 << 20
"""Bytes in flight for the capture thread: enough to keep the bus busy while it hashes a chunk."""
ALIGNMENT_BYTES = 512
"""Alignment at which device kernels copy at full speed."""


class SpareBlock(Protocol):
    """A block of a slab, in use until ``release``."""

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, flat uint8."""
        ...

    def release(self) -> None: ...


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
    """A block with the copies of several segments; released with the last of them."""

    def __init__(self, block: SpareBlock, segments: Sequence[Segment]) -> None:
        self._block = block
        self._remaining = len(segments)
        self._lock = threading.Lock()
        self.targets: list[tuple[Segment, torch.Tensor]] = []
        at = 0
        for segment in segments:
            self.targets.append((segment, block.tensor[at : at + size_of(segment)]))
            at += _aligned(size_of(segment))

    @classmethod
    def for_last(cls, slab: Slab, segments: Sequence[Segment]) -> SpillBuffer | None:
        """Allocate a buffer for as many of the last segments as a slab has room for; None if there is no room."""
        room, needed, first = slab.largest_free_bytes, 0, len(segments)
        while first > 0 and needed + (size := _aligned(size_of(segments[first - 1]))) <= room:
            needed, first = needed + size, first - 1
        block = slab.reserve(needed) if needed else None
        return None if block is None else cls(block, segments[first:])

    def release(self, count: int = 1) -> None:
        """Release the room of ``count`` segments."""
        with self._lock:
            self._remaining -= count
            if self._remaining == 0:
                self._block.release()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """One segment being copied; ``spill_buffer`` is the buffer that it is read from (None: the state itself)."""

    segment: Segment
    event: StreamEvent
    spill_buffer: SpillBuffer | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.segment)


def size_of(segment: Segment) -> int:
    return sum(piece.end - piece.start for piece in segment)


class CopiesInFlight:
    """The copies in flight. Callers of methods that change it hold the copier's lock, unless stated otherwise."""

    def __init__(self, streams: Mapping[int, CopyStream]) -> None:
        self.streams = streams
        self._in_flight: deque[CopyInFlight] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        return self._bytes >= FLYING_BYTES_MAX

    @property
    def first(self) -> CopyInFlight | None:
        """The copy that was launched first; needs no lock."""
        try:
            return self._in_flight[0]
        except IndexError:
            return None

    @property
    def segments(self) -> list[Segment]:
        """The segments that are being read from the state itself."""
        return [copy.segment for copy in self._in_flight if copy.spill_buffer is None]

    def launch(
        self,
        segment: Segment,
        work: Callable[[], None],
        *,
        shelter: SpillBuffer | None,
        lock: threading.Lock,
    ) -> None:
        """Enqueue the copies of a segment on the stream of its device; acquires the lock itself.

        If that fails or is interrupted, no copy of the segment is in flight when it raises.
        """
        stream = self.streams[segment[0].place]
        try:
            copy = CopyInFlight(segment, stream.enqueue(work), shelter)
            with lock:
                self._in_flight.append(copy)
                self._bytes += copy.size_bytes
        except BaseException:
            stream.finish()  # some copies may be enqueued, and nothing else would wait for them
            raise

    def has(self, copy: CopyInFlight) -> bool:
        return copy in self._in_flight

    def remove(self, copy: CopyInFlight) -> None:
        """Remove a completed copy."""
        self._in_flight.remove(copy)
        self._bytes -= copy.size_bytes
        if copy.spill_buffer is not None:
            copy.spill_buffer.release()

    def wait_for_callers(self) -> None:
        """Run everything that is launched from now on after the caller's work on its device; needs no lock."""
        for stream in self.streams.values():
            stream.wait_for_caller()

    def make_callers_wait(self) -> None:
        """Run the caller's further work on each device after everything that was launched; needs no lock."""
        for stream in self.streams.values():
            stream.make_caller_wait()


class CaptureDevices:
    """The devices of one process, numbered in the order in which they are found.

    After ``places_of``, ``without_stream`` names the types of devices without a copy stream: their tensors are read
    like host memory, by the thread that works on them.
    """

    def __init__(self, streams: Streams, slab: Slab | None = None) -> None:
        self._makes = streams
        self._has_devices = torch.accelerator.is_available()
        self._slab = slab
        self._numbers: dict[torch.device, int] = {}
        self.streams: dict[int, CopyStream] = {}
        self.without_stream: set[str] = set()

    def places_of(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The place of each tensor; empty if all are in host memory."""
        self.without_stream.clear()
        if not self._has_devices or all(map(_IS_CPU, sources)):
            return ()
        return tuple([HOST if source.is_cpu else self._number(source.device) for source in sources])

    def present_value(self, value: torch.Tensor, places: Sequence[int]) -> torch.Tensor | float:
        """The present value of a number. If the state has tensors on the number's device (``places``), a clone, as
        their capture is ordered after it; otherwise the host waits for the value."""
        if value.is_cpu:
            return value
        return value.clone() if self._numbers.get(value.device) in places else float(value)

    @property
    def slab(self) -> tuple[int, Slab] | None:
        """Spare device memory and its place; None if no tensor of the state is on that device."""
        if self._slab is None or self._slab.device not in self._numbers:
            return None
        return self._numbers[self._slab.device], self._slab

    def _number(self, device: torch.device) -> int:
        found = self._numbers.get(device)
        if found is not None:
            return found
        stream = self._makes.of(device)
        if stream is None:
            self.without_stream.add(device.type)
            return HOST
        number = self._numbers[device] = len(self._numbers)
        self.streams[number] = stream
        return number
