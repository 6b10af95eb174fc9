"""Which bytes of an object were written: ranges that may come in any order, and twice after a retry.

Counting bytes alone would take a range written twice for one that is missing, so ranges are kept, merged as they
meet. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Coverage:
    """The union of the ranges added so far."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
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
