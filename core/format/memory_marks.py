"""The marks of an image in memory. They are appended: a pin holds until an unpin that follows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierfall.core.format.records import Mark, parse_mark
from tierfall.core.types import keys


@dataclass(frozen=True, slots=True)
class MemoryMarks:
    """The names of the marks of an image in memory, and ``Mark.written_to`` of its pin."""

    names: frozenset[str] = frozenset()
    pin_written_to: frozenset[str] = frozenset()

    def with_next(self, mark: Mark) -> MemoryMarks:
        """The marks after one more was appended."""
        if mark.name == keys.UNPIN_MARK:
            return MemoryMarks(self.names - {keys.PIN_MARK})
        return MemoryMarks(self.names | {mark.name}, self.pin_written_to.union(mark.written_to))


def parse_memory_marks(marks: Iterable[bytes], *, what: str) -> MemoryMarks:
    """Parse the marks of an image in memory, oldest first."""
    found = MemoryMarks()
    for data in marks:
        found = found.with_next(parse_mark(data, what=what))
    return found
