"""What backends and their writers share: checks of a call and its error messages, the length of an object, the ranges
that were written, the states of a writer."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from tierfall.backends.toolkit.keys import check_key
from tierfall.core.types.backend import Publish, Traits, Writer
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    TruncatedError,
    UnreachableError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The length of an object in bytes (``length``), or an upper bound of it (``length_max``), as far as known.

    ``what`` in its methods is the operation, key and place for the error message.
    """

    length: int | None
    length_max: int | None

    @property
    def most_bytes(self) -> int | None:
        """The upper bound of the length; None where neither was given."""
        return self.length_max if self.length is None else self.length

    def check(self, what: str) -> None:
        """Raise BackendError where a number is negative, or the length exceeds its bound."""
        for name, value in (("length", self.length), ("length_max", self.length_max)):
            if value is not None and value < 0:
                raise BackendError(f"{what}: a {name} of {value} bytes; expected 0 or more")
        if self.length_max is not None and (self.length or 0) > self.length_max:
            raise BackendError(
                f"{what}: a length of {self.length} bytes exceeds the length_max of {self.length_max}"
            )

    def check_range(self, what: str, offset: int, size_bytes: int) -> None:
        """Raise BackendError where a range is outside of the object."""
        most_bytes = self.most_bytes
        if offset < 0 or (most_bytes is not None and offset + size_bytes > most_bytes):
            raise BackendError(
                f"{what}: bytes {offset} to {offset + size_bytes} are outside of the {most_bytes} bytes that it was "
                "created for"
            )


class Coverage:
    """The union of the byte ranges added so far, in any order and with overlaps. A count of bytes could not tell a
    range that a retry wrote twice from a missing one. Not thread-safe: the owner locks."""

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
        """The highest end of any range; 0 where there is none."""
        return self._ends[-1] if self._ends else 0

    def missing(self, length: int | None) -> str | None:
        """Return None if the ranges are exactly the bytes 0 to ``length`` (None: to the highest end), else what is
        wrong, for an error message."""
        expected = self.end if length is None else length
        if self.end > expected:
            return f"{self.end} bytes were written, {expected} expected"
        if expected == 0 or (self._starts == [0] and self._ends == [expected]):
            return None
        covered = sum(self._ends) - sum(self._starts)
        return f"{covered} of {expected} bytes were written"


class AbortOnExit(ABC):
    """The context manager of a writer: leaving it calls ``abort``, which a subclass defines. ``abort`` does nothing
    once the object is published, and may be called twice."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing visible of an object that is not published."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.abort()


class WriterState(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    WAITING = "waiting to be published again"
    PUBLISHED = "published"
    DEAD = "dead"


class WriterBase(AbortOnExit):
    """The states of a writer, and ``publish`` and ``abort`` over them; a subclass writes and publishes the bytes.

    A writer is open until ``publish`` is called. After a retryable failure of that, ``publish`` may be called again
    (unless ``_publishes_once``); after any other failure the writer is dead. A conditional create is never repeated: if
    the answer to the first request was lost, the second could fail because of the first.
    """

    _publishes_once: ClassVar[bool] = False

    def __init__(self, key: str, place: str, *, extent: Extent, publish: Publish) -> None:
        self._key = key
        self._place = place
        self._extent = extent
        self._publish_mode = publish
        self._lock = threading.Lock()
        self._state = WriterState.OPEN

    def find(self, offset: int, view: memoryview) -> bool:
        """See ``Writer``. False by default: what is left is compared as it is written."""
        return False

    def publish(self) -> None:
        with self._lock:
            if self._state not in (WriterState.OPEN, WriterState.WAITING):
                self._refuse("publish")
            self._state = WriterState.PUBLISHING
        try:
            self._finish(self._what("publish"))
        except BaseException as error:
            replaces = self._publish_mode is not Publish.IF_ABSENT
            may_repeat = replaces and not self._publishes_once
            if may_repeat and isinstance(error, BackendError) and error.retryable:
                self._state = WriterState.WAITING
            else:
                self._die()
            raise
        self._state = WriterState.PUBLISHED
        self._on_published()

    def abort(self) -> None:
        with self._lock:
            if self._state not in (WriterState.OPEN, WriterState.WAITING):
                return
            self._state = WriterState.DEAD
        self._die()

    @abstractmethod
    def _finish(self, what: str) -> None:
        """Make the object visible, or raise."""

    @abstractmethod
    def _on_published(self) -> None:
        """Free the memory of a published object."""

    @abstractmethod
    def _die(self) -> None:
        """Set the state to dead, and remove what was written; ``discard_unfinished`` removes what cannot be removed
        now."""

    def _check_open(self, operation: str) -> None:
        if self._state is not WriterState.OPEN:
            self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        raise BackendError(
            f"{self._what(operation)}: this writer is {self._state}; create a new one"
        )

    def _what(self, operation: str) -> str:
        return describe(operation, self._key, self._place)


class BackendBase(ABC):
    """The traits and the place of a backend, and the checks that begin its methods. A subclass sets ``_traits``."""

    _traits: Traits
    _not_conditional: ClassVar[str] = "this store creates nothing conditionally"
    """The error of ``Publish.IF_ABSENT`` where the traits have no ``conditional_create``."""

    def __init__(self, place: str, *, read_only: bool) -> None:
        self._place = place
        self._read_only = read_only

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place!r})"

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def place(self) -> str:
        return self._place

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """See ``Backend``. False by default: there is no cache."""
        check_key(key)
        return False

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        """See ``Backend``."""
        what = self._what("create", check_key(key))
        extent = Extent(length=length, length_max=length_max)
        extent.check(what)
        if publish is Publish.IF_ABSENT and not self._traits.conditional_create:
            raise BackendError(f"{what}: {self._not_conditional}")
        self._check_writable(what)
        return self._create(key, extent, publish)

    @abstractmethod
    def _create(self, key: str, extent: Extent, publish: Publish) -> Writer:
        """Begin an object; the arguments are valid, and allowed here."""

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise AccessDeniedError(f"{what}: it was opened for reading only; open it for writing")

    def _short_read(self, what: str, offset: int, end: int, length: int) -> BackendError:
        """Make the error of a read that got too few bytes of an object of ``length`` bytes."""
        if 0 <= offset < end <= length:
            return UnreachableError(f"{what}: fewer bytes came than were asked for; try again")
        return TruncatedError(
            f"{what}: bytes {offset} to {end} were asked for, but it ends at {length}; it was cut short, or another "
            "object was expected"
        )

    def _what(self, operation: str, key: str) -> str:
        return describe(operation, key, self._place)


def describe(operation: str, key: str, place: str) -> str:
    """Name an operation, its key and the place for an error message."""
    return f"{operation} {key!r} in {place}"
