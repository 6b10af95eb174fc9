"""Copies off devices that are under way: launched in order, landed in order, a bounded number of bytes ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tierfall.core.image.segments import Segment
from tierfall.core.runtime.streams import CopyStream, StreamEvent

FLYING_BYTES_MAX = 256 << 20
"""What the capture thread lets be under way: enough to keep the bus busy while it hashes a chunk."""
ALIGNMENT_BYTES = 512
"""What device kernels copy at full speed from."""


class SpareBlock(Protocol):
    """A piece of a slab, in somebody's use until ``release``."""

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
    def room_bytes(self) -> int:
        """What may be taken in one piece."""
        ...

    def take(self, size_bytes: int) -> SpareBlock | None:
        """Take so many bytes; None where they are not free in one piece."""
        ...


class SpillBuffer:
    """A block that several segments share, one after the other; it goes back when the last of them has left."""

    def __init__(self, block: SpareBlock, segments: Sequence[Segment]) -> None:
        self._block = block
        self._left = len(segments)
        self._lock = threading.Lock()
        self.rooms: list[tuple[Segment, torch.Tensor]] = []
        at = 0
        for segment in segments:
            self.rooms.append((segment, block.tensor[at : at + size_of(segment)]))
            at += _aligned(size_of(segment))

    @classmethod
    def for_last(cls, slab: Slab, segments: Sequence[Segment]) -> SpillBuffer | None:
        """Shelter as many of the last segments as a slab has room for; None where that is none."""
        room, needed, first = slab.room_bytes, 0, len(segments)
        while first > 0 and needed + (size := _aligned(size_of(segments[first - 1]))) <= room:
            needed, first = needed + size, first - 1
        block = slab.take(needed) if needed else None
        return None if block is None else cls(block, segments[first:])

    def leave(self, count: int = 1) -> None:
        """So many of the segments need their room no more."""
        with self._lock:
            self._left -= count
            if self._left == 0:
                self._block.release()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True, eq=False)
class CopyInFlight:
    """One segment on its way; ``shelter`` is what it flies from, where that is not the state itself."""

    segment: Segment
    mark: StreamEvent
    shelter: SpillBuffer | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.segment)


def size_of(segment: Segment) -> int:
    return sum(piece.end - piece.start for piece in segment)


class CopiesInFlight:
    """What is under way. Whoever changes it holds the filling's lock, but for what is said otherwise."""

    def __init__(self, streams: Mapping[int, CopyStream]) -> None:
        self.streams = streams
        self._flying: deque[CopyInFlight] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._flying)

    @property
    def is_full(self) -> bool:
        return self._bytes >= FLYING_BYTES_MAX

    @property
    def first(self) -> CopyInFlight | None:
        """The one that was launched first; asked without the lock."""
        try:
            return self._flying[0]
        except IndexError:
            return None

    @property
    def segments(self) -> list[Segment]:
        """What flies from the state itself."""
        return [flight.segment for flight in self._flying if flight.shelter is None]

    def launch(
        self,
        segment: Segment,
        work: Callable[[], None],
        *,
        shelter: SpillBuffer | None,
        lock: threading.Lock,
    ) -> None:
        """Queue copies on the stream of the device that a segment lies on; takes the lock itself.

        Where that fails, or is interrupted, nothing is under way any more when it raises.
        """
        stream = self.streams[segment[0].place]
        try:
            flight = CopyInFlight(segment, stream.enqueue(work), shelter)
            with lock:
                self._flying.append(flight)
                self._bytes += flight.size_bytes
        except BaseException:
            stream.finish()  # a part may be queued, and nobody would wait for it
            raise

    def has(self, flight: CopyInFlight) -> bool:
        return flight in self._flying

    def landed(self, flight: CopyInFlight) -> None:
        """Take a flight for done."""
        self._flying.remove(flight)
        self._bytes -= flight.size_bytes
        if flight.shelter is not None:
            flight.shelter.leave()

    def follow_callers(self) -> None:
        """Let everything that is launched from now on come after the caller's work on its device; needs no lock."""
        for stream in self.streams.values():
            stream.follow_caller()

    def hold_callers(self) -> None:
        """Let the caller's further work on each device come after all that was launched; needs no lock."""
        for stream in self.streams.values():
            stream.hold_caller()
