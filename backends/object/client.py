"""The interface of a client of an object store, on which one backend and its writers are built.

A client makes single requests and has no state but its connections. Its keys are full keys, its ``prefix`` included;
``what`` is the operation, key and place for error messages. Every error is a BackendError. A client never retries. All
methods may be called from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tierfall.core.types.backend import Publish, StoredObject
from tierfall.core.types.errors import BackendError, UnreachableError


class UploadGoneError(BackendError):
    """The store answered that it does not know an unfinished upload."""


class BareAbsenceError(UnreachableError):
    """The answer was 404 without a code: a proxy in front of the store may have sent it."""


class ConflictError(BackendError):
    """The answer was 409, which some stores send if a conditional create finds the key taken."""


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


class ObjectClient(ABC):
    """A place in an object store, or in what is used as one.

    ``place``: the address for messages, without a credential. ``prefix``: that of every full key, '' or ending in '/'.
    ``durable``: an object that the store has acknowledged survives a power cut. ``atomic_replace``: a reader during
    ``put`` or ``finish`` sees the old or the new object, never a mixture or none. ``supports_if_absent``: ``put`` can
    send the condition IF_ABSENT; a probe finds out whether the store obeys it. ``max_parallel``: requests that usefully
    run at once. ``keys_max``: the most keys of one ``delete_some``; 1: it lacks the call.

    An object too large for memory is uploaded in parts if the client ``takes_parts`` (``begin``, ``put_part``,
    ``complete``), in order if it ``takes_streams`` (``open_stream``); a client with neither gets every object by one
    ``put``.
    """

    place: str
    prefix: str = ""
    durable: bool
    atomic_replace: bool = True
    supports_if_absent: bool
    takes_parts: bool = False
    takes_streams: bool = False
    keys_max: int = 1
    max_parallel: int = 8

    @abstractmethod
    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        """Create an object by one request; raises KeyExistsError where IF_ABSENT finds the key taken."""

    @abstractmethod
    def head(self, key: str, what: str) -> int:
        """Return the length of an object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        """Fill the view from ``offset``; return the number of bytes read, fewer where the object ends before."""

    @abstractmethod
    def list(self, prefix: str, what: str) -> Iterable[StoredObject]:
        """List every object below a prefix by its full key, in any order."""

    @abstractmethod
    def delete(self, key: str, what: str) -> None: ...

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        """Make one request; return the keys that the store did not delete, whose objects may still exist. Raises if
        that is all of them."""
        raise NotImplementedError

    def begin(self, key: str, what: str) -> str:
        """Begin an upload, whose parts are sent in any order, each of them again if need be; return its id."""
        raise NotImplementedError

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part (numbered from 1); return its etag."""
        raise NotImplementedError

    def parts(self, key: str, upload: str, what: str) -> Mapping[int, tuple[str, int]]:
        """Return the parts of an upload that the store has: by number, etag and bytes; none by default."""
        return {}

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible. ``parts`` are number and etag, by number. Raises UploadGoneError where the store
        does not know the upload."""
        raise NotImplementedError

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        """Begin an object of at most ``most_bytes`` (None: unknown). Makes no request yet."""
        raise NotImplementedError

    @abstractmethod
    def pending(self, prefix: str, what: str) -> Iterable[tuple[str, str]]:
        """List unfinished objects below a prefix as full key and id, as far as the store lists them."""

    @abstractmethod
    def abort(self, key: str, unfinished: str, what: str) -> None:
        """Remove an unfinished object of ``pending`` or ``begin``; a missing one is no error."""

    @abstractmethod
    def check_open(self, *, read_only: bool) -> None:
        """List the place, so that wrong credentials and a missing bucket are errors now. A missing folder is an error
        only if ``read_only``: the first write creates it."""

    @abstractmethod
    def close(self) -> None: ...
