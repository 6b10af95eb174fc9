"""The interface of a client of an object store, on which one backend and its writers are built.

A client makes single requests and has no state but its connections. Its keys are full keys, its ``prefix`` included;
``what`` is the operation, key and place for error messages. Every error is a BackendError. A client never retries. All
methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError, UnreachableError

MAX_PARALLEL = 8
"""Requests to a store over a network that usefully run at once."""


class UploadGoneError(BackendError):
    """The store answered that it does not know an unfinished upload."""


class BareAbsenceError(UnreachableError):
    """The answer was 404 without a code: a proxy in front of the store may have sent it."""


class ConflictError(BackendError):
    """The answer was 409, which some stores send if a conditional create finds the key taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object's length and etag; ``etag`` has no quotation marks, and is '' where there is none."""

    bytes: int
    etag: str


class Row(NamedTuple):
    """An object in a listing: its full key, its length, and a text that changes when it is rewritten ('' where the
    store reports none)."""

    key: str
    bytes: int
    version: str = ""


class Uploads(Protocol):
    """Multipart uploads: parts are sent in any order, and each can be sent again."""

    def begin(self, key: str, what: str) -> str:
        """Begin an upload; return its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part (numbered from 1); return its etag."""
        ...

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible. ``parts`` are number and etag, by number. Raises UploadGoneError where the store
        does not know the upload."""
        ...


class Deletions(Protocol):
    """Requests that delete several objects at once."""

    @property
    def keys_max(self) -> int:
        """The greatest number of keys in one request."""
        ...

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        """Make one request; return the keys that the store did not delete, whose objects may still exist. Raises if
        that is all of them; KeyNotFoundError if the store answered only that some objects do not exist."""
        ...


class Stream(Protocol):
    """One object that is written in rising order; nothing is visible under its key before ``finish`` returns.

    After an error of ``write`` or ``finish``, only ``abort`` may be called.
    """

    @property
    def unfinished(self) -> str:
        """Its id in ``pending``; '' where ``pending`` does not list it."""
        ...

    def write(self, view: memoryview) -> None:
        """Write the next bytes; keeps no reference to the view."""
        ...

    def finish(self) -> None: ...

    def abort(self) -> None:
        """Remove what was written, as far as the store answers."""
        ...


class Streams(Protocol):
    """Objects that are written in rising order, where single parts cannot be sent again."""

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        """Begin an object of at most ``most_bytes`` (None: unknown). Makes no request yet."""
        ...


class ObjectClient(Protocol):
    """A place in an object store, or in what is used as one."""

    @property
    def place(self) -> str:
        """The address for messages, without a credential."""
        ...

    @property
    def prefix(self) -> str:
        """The prefix of every full key: '', or ending in '/'."""
        ...

    @property
    def durable(self) -> bool:
        """Whether an object that the store has acknowledged survives a power cut."""
        ...

    @property
    def atomic_replace(self) -> bool:
        """Whether a reader during ``put`` or ``finish`` sees the old or the new object, never a mixture or none."""
        ...

    @property
    def supports_if_absent(self) -> bool:
        """Whether ``put`` can send the condition IF_ABSENT; a probe finds out whether the store obeys it."""
        ...

    @property
    def uploads(self) -> Uploads | None:
        """None: the store has no multipart uploads."""
        ...

    @property
    def streams(self) -> Streams | None:
        """How a client without ``uploads`` writes objects that are too large for memory. None: it has no way, and each
        object is kept in memory for one ``put``."""
        ...

    @property
    def deletions(self) -> Deletions | None:
        """None: objects are deleted one by one."""
        ...

    @property
    def max_parallel(self) -> int:
        """Number of concurrent requests beyond which nothing is gained."""
        ...

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        """Create an object by one request; raises KeyExistsError where IF_ABSENT finds the key taken."""
        ...

    def head(self, key: str, what: str) -> ObjectInfo: ...

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        """Fill the view from ``offset``; return the number of bytes read, fewer where the object ends before."""
        ...

    def list(self, prefix: str, what: str) -> Iterable[Row]:
        """List every object below a prefix, in any order."""
        ...

    def delete(self, key: str, what: str) -> None: ...

    def pending(self, prefix: str, what: str) -> Iterable[tuple[str, str]]:
        """List unfinished objects below a prefix as full key and id, as far as the store lists them."""
        ...

    def abort(self, key: str, unfinished: str, what: str) -> None:
        """Remove an unfinished object of ``pending`` or ``begin``; a missing one is no error."""
        ...

    def check_open(self) -> None:
        """List one row, so that wrong credentials and a missing bucket are errors now."""
        ...

    def close(self) -> None: ...
