"""The interface of a client of an object store, on which one backend and its writers are built; and the client of a
plug-in's store.

A client makes single requests and has no state but its connections. Its keys are full keys, its ``prefix`` included;
``what`` is the operation, key and place for error messages. Every error is a BackendError. A client never retries. All
methods may be called from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

from tierfall.backends.toolkit.object_store import MultipartStore, ObjectStore
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, StoredObject
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    TierfallError,
    UnreachableError,
)


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


class StoreClient(ObjectClient):
    """A client of a plug-in's store, whose exceptions, and answers of another type, are raised as BackendErrors.
    ``place`` names the store in messages, such as its address, without a credential."""

    def __init__(self, store: ObjectStore, *, place: str) -> None:
        self._store = store
        self.place = place
        self.durable = store.durable
        self.supports_if_absent = store.conditional_create
        self.max_parallel = store.max_parallel
        self.takes_parts = isinstance(store, MultipartStore)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        if_absent = publish is Publish.IF_ABSENT
        with self.translated(what):
            is_new = self._store.put(key, data.toreadonly(), if_absent)
            if if_absent and not isinstance(is_new, bool):
                raise BackendError(
                    f"{what}: {self._name}.put returned {is_new!r:.40}; expected True, or False if the key is taken"
                )
        if if_absent and not is_new:
            raise KeyExistsError(f"{what}: the key is taken")

    def head(self, key: str, what: str) -> int:
        return self._get(key, 0, 0, what)[1]

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        data, _ = self._get(key, offset, offset + view.nbytes, what)
        if data.nbytes > view.nbytes:
            raise BackendError(
                f"{what}: {self._name}.get returned more bytes than it was asked for"
            )
        copy_bytes(view[: data.nbytes], data)
        return data.nbytes

    def list(self, prefix: str, what: str) -> Iterator[StoredObject]:
        folder, slash, start = prefix.rpartition("/")
        with self.translated(what):
            found = list(self._store.list(folder + slash, "/" if start else ""))
        for each in found:
            if not isinstance(each, StoredObject):
                raise BackendError(
                    f"{what}: {self._name}.list returned {each!r:.40}; expected a StoredObject(key=..., bytes=...) "
                    "for each object"
                )
            if each.key.startswith(prefix):
                yield each

    def delete(self, key: str, what: str) -> None:
        with self.translated(what):
            self._store.delete(key)

    def begin(self, key: str, what: str) -> str:
        with self.translated(what):
            return self._text(self._parts.begin(key), "begin", what)

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        with self.translated(what):
            mark = self._parts.put_part(key, upload, number, view.toreadonly())
            return self._text(mark, "put_part", what)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        with self.translated(what):
            self._parts.complete(key, upload, parts)

    def pending(self, prefix: str, what: str) -> Sequence[tuple[str, str]]:
        with self.translated(what):
            return list(self._parts.pending(prefix)) if self.takes_parts else ()

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with self.translated(what):
            self._parts.abort(key, unfinished)

    def check_open(self, *, read_only: bool) -> None:
        """Do nothing: the store was opened when it was constructed."""

    def close(self) -> None:
        with self.translated(f"close {self.place}"):
            self._store.close()

    def _get(self, key: str, start: int, end: int, what: str) -> tuple[memoryview, int]:
        with self.translated(what):
            found = self._store.get(key, start, end)
            if found is None:
                raise KeyNotFoundError(f"{what}: there is no such object")
            match found:
                case (bytes() | bytearray() | memoryview() as data, int() as length):
                    return flat(memoryview(data)), length
            raise BackendError(
                f"{what}: {self._name}.get returned {found!r:.40}; expected bytes and the object's length, or None if "
                "there is no object"
            )

    def _text(self, answer: object, call: str, what: str) -> str:
        if isinstance(answer, str) and answer:
            return answer
        raise BackendError(f"{what}: {self._name}.{call} returned {answer!r:.40}; expected a text")

    @property
    def _parts(self) -> MultipartStore:
        return cast(MultipartStore, self._store)

    @property
    def _name(self) -> str:
        return type(self._store).__name__

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise exceptions of the store's library as ``error_type`` classifies them."""
        try:
            yield
        except TierfallError:
            raise
        except Exception as error:
            raise self._store.error_type(error)(f"{what}: {error!r}") from error
