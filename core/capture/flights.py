"""Copies off devices that are under way: launched in order, landed in order, a bounded number of bytes ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tierfall.core.capture.cutting import Segment
from tierfall.core.capture.streams import CopyStream, Mark

FLYING_BYTES_MAX = 256 << 20
"""What the capture thread lets be under way: enough to keep the bus busy while it hashes a chunk."""


class Block(Protocol):
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

    def take(self, size_bytes: int) -> Block | None:
        """Take so many bytes; None where they are not free in one piece."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """One segment on its way; ``block`` is what it flies from, where that is not the state itself."""

    segment: Segment
    mark: Mark
    block: Block | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.segment)


def size_of(segment: Segment) -> int:
    return sum(piece.end - piece.start for piece in segment)


class Flights:
    """What is under way. Whoever changes it holds the filling's lock, but for what is said otherwise."""

    def __init__(self, streams: Mapping[int, CopyStream]) -> None:
        self.streams = streams
        self._flying: deque[Flight] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._flying)

    @property
    def is_full(self) -> bool:
        return self._bytes >= FLYING_BYTES_MAX

    @property
    def first(self) -> Flight | None:
        """The one that was launched first; asked without the lock."""
        try:
            return self._flying[0]
        except IndexError:
            return None

    @property
    def segments(self) -> list[Segment]:
        """What flies from the state itself."""
        return [flight.segment for flight in self._flying if flight.block is None]

    def enqueue(self, segment: Segment, work: Callable[[], None]) -> Mark:
        """Queue copies on the stream of the device that a segment lies on; needs no lock."""
        return self.streams[segment[0].place].enqueue(work)

    def add(self, flight: Flight) -> None:
        self._flying.append(flight)
        self._bytes += flight.size_bytes

    def landed(self, flight: Flight) -> bool:
        """Take a flight for done, once; False where it was already."""
        if flight not in self._flying:
            return False
        self._flying.remove(flight)
        self._bytes -= flight.size_bytes
        if flight.block is not None:
            flight.block.release()
        return True

    def follow_callers(self) -> None:
        """Let everything that is launched from now on come after the caller's work on its device; needs no lock."""
        for stream in self.streams.values():
            stream.follow_caller()

    def hold_callers(self) -> None:
        """Let the caller's further work on each device come after all that was launched; needs no lock."""
        for stream in self.streams.values():
            stream.hold_caller()
