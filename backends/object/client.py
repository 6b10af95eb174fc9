"""What a library for object stores has to offer so that one backend and its writers can be built on any of them.

A client makes single requests and keeps no state but its connections. It names objects by their full key, its
``prefix`` included; ``what`` names operation, key and place for messages. Every error it raises is a BackendError;
it never repeats a request that failed. All methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError, UnreachableError


class UploadGoneError(BackendError):
    """The store answered that it does not know an unfinished upload."""


class BareAbsenceError(UnreachableError):
    """The answer was 404 and did not say what is missing: whoever stands before a store says that too."""


class ConflictError(BackendError):
    """The answer was 409, by which some stores say of a conditional create that it lost."""


class NotServedError(BackendError):
    """A protocol or the name of an option that a library does not know; another one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object as the store describes it; ``etag`` without quotation marks, '' where there is none."""

    bytes: int
    etag: str


class Row(NamedTuple):
    """An object as a listing reports it: its full key, its size, and what changes when it is written anew ('' where the
    store does not say)."""

    key: str
    bytes: int
    version: str = ""


class Uploads(Protocol):
    """Uploads in parts, which may come in any order and be sent again one by one."""

    def begin(self, key: str, what: str) -> str:
        """Begin an upload; return its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part (numbered from 1); return its etag."""
        ...

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible from parts as number and etag, rising; UploadGoneError where it is not known."""
        ...


class Deletions(Protocol):
    """Requests that delete several objects at once."""

    @property
    def keys_max(self) -> int:
        """How many one request takes."""
        ...

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        """Ask once; return the keys that the store did not delete, whose objects may be there still. Raises where
        that is all of them: KeyNotFoundError where the store says no more than that some were not there."""
        ...


class Stream(Protocol):
    """One object whose bytes come in rising order; nothing is visible under its key before ``finish`` returned.

    After an error of ``write`` or ``finish`` only ``drop`` is of use.
    """

    @property
    def unfinished(self) -> str:
        """What ``pending`` would list it as; '' where it is listed nowhere."""
        ...

    def write(self, view: memoryview) -> None:
        """Take the next bytes; no reference to the view is kept."""
        ...

    def finish(self) -> None: ...

    def drop(self) -> None:
        """Leave nothing behind, as far as the store can be asked."""
        ...


class ObjectClient(Protocol):
    """A place in an object store, or in what is used as one."""

    @property
    def place(self) -> str:
        """The address for messages, without a credential."""
        ...

    @property
    def prefix(self) -> str:
        """What stands before every key: empty, or ending in '/'."""
        ...

    @property
    def durable(self) -> bool:
        """Whether what the store has taken survives a power cut."""
        ...

    @property
    def atomic_replace(self) -> bool:
        """Whether a reader beside ``put`` or ``finish`` sees the old or the new object, never a mixture or none."""
        ...

    @property
    def knows_condition(self) -> bool:
        """Whether ``put`` may be asked for IF_ABSENT at all; whether the store heeds it is for a probe to find."""
        ...

    @property
    def uploads(self) -> Uploads | None:
        """Where None, what is too large for ``put`` is written as a stream."""
        ...

    @property
    def deletions(self) -> Deletions | None:
        """Where None, objects are deleted one by one."""
        ...

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        """Begin an object of ``most_bytes`` at most (None: not known). Nothing is asked of the store yet."""
        ...

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        """Create an object at one blow; KeyExistsError where IF_ABSENT lost."""
        ...

    def look(self, key: str, what: str) -> Found: ...

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        """Fill the view from ``offset``; return how many bytes there were, fewer where the object ends before."""
        ...

    def rows(self, prefix: str, what: str) -> Iterable[Row]:
        """Every object below a prefix, in any order."""
        ...

    def delete(self, key: str, what: str) -> None: ...

    def pending(self, prefix: str, what: str) -> Iterable[tuple[str, str]]:
        """What was begun below a prefix and not finished, as full key and id, as far as it can be listed."""
        ...

    def abort(self, key: str, unfinished: str, what: str) -> None:
        """Remove what ``pending`` listed or ``begin`` began; what is gone already is no error."""
        ...

    def check_open(self) -> None:
        """Ask the place for a row, to show wrong keys and a place that is not there."""
        ...

    def close(self) -> None: ...
