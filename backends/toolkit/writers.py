"""What every writer needs: the length that its object may have, the ranges that were written, and its ``with``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tierfall.core.types.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long an object will be (``length``) or at most (``length_max``), in bytes, as far as it is known.

    ``what`` in its methods names operation, key and place for the error.
    """

    length: int | None
    length_max: int | None

    @property
    def most_bytes(self) -> int | None:
        """What the object cannot exceed; None where nothing was said."""
        return self.length_max if self.length is None else self.length

    def check(self, what: str) -> None:
        """Raise BackendError where the numbers make no sense."""
        for name, value in (("length", self.length), ("length_max", self.length_max)):
            if value is not None and value < 0:
                raise BackendError(f"{what}: a {name} of {value} bytes; expected 0 or more")
        if self.length_max is not None and (self.length or 0) > self.length_max:
            raise BackendError(
                f"{what}: a length of {self.length} bytes exceeds the length_max of {self.length_max}"
            )

    def check_range(self, what: str, offset: int, size_bytes: int) -> None:
        """Raise BackendError where a range lies outside of the object."""
        most_bytes = self.most_bytes
        if offset < 0 or (most_bytes is not None and offset + size_bytes > most_bytes):
            raise BackendError(
                f"{what}: bytes {offset} to {offset + size_bytes} lie outside of the {most_bytes} bytes that it was "
                "created for"
            )


class Coverage:
    """The union of the byte ranges added so far, in any order, also twice after a retry: a count of bytes would take a
    range that was written twice for one that is missing. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the bytes ``start`` to ``end``; an empty range adds nothing."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    @property
    def end(self) -> int:
        """The highest end of any range; 0 when there is none."""
        return self._ends[-1] if self._ends else 0

    def missing(self, length: int | None) -> str | None:
        """Say what keeps the ranges from being exactly the bytes 0 to ``length`` (None: to the end), or None."""
        expected = self.end if length is None else length
        if self.end > expected:
            return f"{self.end} bytes were written, {expected} expected"
        if expected == 0 or (self._starts == [0] and self._ends == [expected]):
            return None
        covered = sum(self._ends) - sum(self._starts)
        return f"{covered} of {expected} bytes were written"


class AbortOnExit(ABC):
    """The ``with`` of a writer: leaving it calls ``abort``, which a subclass defines. That does nothing once the object
    is published, and may be called twice."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing visible of an object that is not published."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()
