"""A backend over any store of named values: a plug-in writes get, put, delete and list, and this does all else.

How an object lies in the store, see ``store``. No writer holds more in memory than the pieces that it has a part of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from tierfall.backends.toolkit.keys import check_key, check_prefix, is_key, unfinished_name
from tierfall.backends.toolkit.store import (
    HEAD_BYTES,
    MAGIC,
    KeyValueStore,
    Pieces,
    Values,
    folder_of,
    piece_of,
)
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.backends.toolkit.writers import AbortOnExit, Coverage, Extent
from tierfall.core.types.backend import Publish, StoredObject, Traits
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
)


class KeyValueBackend:
    """A ``Backend`` over a store of named values.

    ``place`` is what messages call it, such as the address: never a credential. ``read_only``: writing and deleting are
    AccessDeniedError, and the store's ``put`` and ``delete`` are never called. Raises ConfigError where the store lacks
    something, naming it.
    """

    def __init__(self, store: KeyValueStore, *, place: str, read_only: bool = False) -> None:
        self.values = Values(store)
        self._place = place
        self._read_only = read_only
        self.living: set[str] = set()
        """The names of the pieces of writers that are neither published nor dead."""
        self._traits = Traits(
            durable=store.durable,
            atomic_replace=True,
            conditional_create=store.conditional_create,
            max_parallel=store.max_parallel,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place!r})"

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def place(self) -> str:
        return self._place

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> KeyValueWriter:
        what = self.what("create", check_key(key))
        extent = Extent(length=length, length_max=length_max)
        extent.check(what)
        if publish is Publish.IF_ABSENT and not self._traits.conditional_create:
            raise BackendError(f"{what}: this store creates nothing conditionally")
        self._check_writable(what)
        return KeyValueWriter(self, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        what = self.what("read", check_key(key))
        target = flat(view, writable=True)
        value, pieces = self.values.find(key, what)
        while True:
            length = value.nbytes if pieces is None else pieces.length
            if offset < 0 or offset + target.nbytes > max(length, offset):
                raise BackendError(
                    f"{what}: bytes {offset} to {offset + target.nbytes} were asked for, but it has {length}; it was "
                    "cut short, or another object was expected"
                )
            if pieces is None:
                copy_bytes(target, value[offset : offset + target.nbytes])
                return
            missing = self._read_pieces(pieces, offset, target, what)
            if missing is None:
                return
            # Replaced or removed meanwhile? Then there is another head, or none, which raises.
            known = pieces
            value, pieces = self.values.find(key, what)
            if pieces == known:
                raise BackendError(f"{what}: it is damaged: its piece {missing!r} is not there")

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        check_key(key)
        return False

    def stat(self, key: str) -> StoredObject:
        value, pieces = self.values.find(key, self.what("stat", check_key(key)))
        return _stored(StoredObject(key=key, bytes=value.nbytes), pieces)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return iter(sorted(self._listed(check_prefix(prefix)), key=lambda each: each.key))

    def delete(self, key: str) -> None:
        what = self.what("delete", check_key(key))
        self._check_writable(what)
        with suppress(KeyNotFoundError):
            _, pieces = self.values.find(key, what)
            # First of all: without it, the pieces are not the object's any more.
            self.values.delete(key, what)
            self.values.delete_pieces(pieces, what)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        keys = [check_key(key) for key in keys]
        self.delete(keys[0])
        return keys[1:]

    def discard_unfinished(self, prefix: str) -> int:
        what = self.what("clean up", check_prefix(prefix))
        self._check_writable(what)
        found: dict[str, list[str]] = {}
        for each in self.values.list(prefix, what):
            name = piece_of(each.key)
            if name is not None:
                found.setdefault(name, []).append(each.key)
        # In this order: a writer that is published meanwhile is seen alive, or its head is there.
        kept = set(self.living)
        kept.update(stored.version for stored in self._listed(prefix))
        dead = [name for name in found if name.rpartition("/")[2] not in kept]
        for name in dead:
            for key in found[name]:
                self.values.delete(key, what)
        return len(dead)

    def close(self) -> None:
        """Close the store. Writers that are still open may not go on."""
        self.values.close(f"close {self._place}")

    def what(self, operation: str, key: str) -> str:
        return f"{operation} {key!r} in {self._place}"

    def _read_pieces(
        self, pieces: Pieces, offset: int, target: memoryview, what: str
    ) -> str | None:
        """Fill a view from an object's pieces; return the name of one that is not there."""
        at = 0
        while at < target.nbytes:
            index, start = divmod(offset + at, pieces.piece_bytes)
            value = self.values.get(pieces.key(index), what)
            if value is None or value.nbytes != pieces.size(index):
                return pieces.key(index)
            part = value[start : start + target.nbytes - at]
            copy_bytes(target[at : at + part.nbytes], part)
            at += part.nbytes
        return None

    def _listed(self, prefix: str) -> Iterator[StoredObject]:
        what = self.what("list", prefix)
        for each in self.values.list(prefix, what):
            if not is_key(each.key):
                continue
            if each.bytes != HEAD_BYTES:
                yield each
                continue
            with suppress(KeyNotFoundError):  # removed meanwhile
                value, pieces = self.values.find(each.key, what)
                yield _stored(
                    StoredObject(key=each.key, bytes=value.nbytes, version=each.version), pieces
                )

    def _check_writable(self, what: str) -> None:
        if self._read_only:
            raise AccessDeniedError(f"{what}: it was opened for reading only; open it for writing")


class _State(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    WAITING = "waiting to be published again"
    PUBLISHED = "published"
    DEAD = "dead"


@dataclass(slots=True)
class _Piece:
    """The part of an object that is not stored yet, in memory."""

    data: bytearray = field(default_factory=bytearray)
    coverage: Coverage = field(default_factory=Coverage)


class KeyValueWriter(AbortOnExit):
    """Fills one new object; see ``Writer``. A piece is stored as soon as all of it was written: straight from the
    caller's memory where one call brings it whole."""

    def __init__(
        self, backend: KeyValueBackend, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        self._backend = backend
        self._values = backend.values
        self._key = key
        self._extent = extent
        self._publish = publish
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._coverage = Coverage()
        self._filling: dict[int, _Piece] = {}
        self._stored: set[int] = set()
        self._is_unanswered = False
        self._name = ""
        limit = backend.values.value_bytes
        self._is_one_value = limit is None or (extent.length is not None and extent.length <= limit)
        # Of a store without a limit, and of an object that fits one value, the only piece never ends before publish.
        self._piece_bytes = limit if limit is not None and not self._is_one_value else 1 << 62
        if not self._is_one_value:
            self._begin()

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        what = self._backend.what("write", self._key)
        with self._lock:
            self._check_open("write")
        try:
            with self._lock:
                self._extent.check_range(what, offset, data.nbytes)
                full = self._fill(offset, data)
            for index, value in full:
                self._put(index, value, what)
            with self._lock:
                self._coverage.add(offset, offset + data.nbytes)
        except BaseException as error:
            if not (isinstance(error, BackendError) and error.retryable):
                self.abort()
            raise

    def publish(self) -> None:
        with self._lock:
            if self._state not in (_State.OPEN, _State.WAITING):
                self._refuse("publish")
            self._state = _State.PUBLISHING
        try:
            self._finish(self._backend.what("publish", self._key))
        except BaseException as error:
            # Created conditionally, it is never asked for twice: the second request could lose to the first.
            is_retryable = isinstance(error, BackendError) and error.retryable
            if is_retryable and self._publish is Publish.REPLACE:
                self._state = _State.WAITING
            else:
                self._die()
            raise
        self._state = _State.PUBLISHED
        self._filling.clear()
        self._backend.living.discard(self._name)

    def abort(self) -> None:
        with self._lock:
            if self._state not in (_State.OPEN, _State.WAITING):
                return
            self._state = _State.DEAD
        self._die()

    def _begin(self) -> None:
        """Name the pieces, before the first one is stored."""
        self._name = unfinished_name()
        self._backend.living.add(self._name)

    def _fill(self, offset: int, data: memoryview) -> list[tuple[int, memoryview]]:
        """Take bytes; return the pieces that are whole now. One in memory stays there until it is stored."""
        full: list[tuple[int, memoryview]] = []
        at = 0
        while at < data.nbytes:
            index, start = divmod(offset + at, self._piece_bytes)
            part = data[at : at + self._piece_bytes - start]
            at += part.nbytes
            if index in self._stored:
                continue  # a second try of a range that went beyond it
            if part.nbytes == self._size(index) and not self._is_one_value:
                full.append((index, part))
                continue
            piece = self._filling.setdefault(index, _Piece())
            if start + part.nbytes > len(piece.data):
                piece.data.extend(bytes(start + part.nbytes - len(piece.data)))
            with memoryview(piece.data) as target:
                copy_bytes(target[start : start + part.nbytes], part)
            piece.coverage.add(start, start + part.nbytes)
            if piece.coverage.missing(self._size(index)) is None and not self._is_one_value:
                full.append((index, memoryview(piece.data)))
        return full

    def _size(self, index: int) -> int:
        """The bytes of a piece, as far as it is known that the object ends in it."""
        length = self._extent.length
        most_bytes = self._piece_bytes
        return most_bytes if length is None else min(most_bytes, length - index * most_bytes)

    def _put(self, index: int, value: memoryview, what: str) -> None:
        key = f"{folder_of(self._key)}{self._name}/{index:08d}"
        self._values.put(key, value, what)
        with self._lock:
            is_dead = self._state is _State.DEAD
            self._stored.add(index)
            self._filling.pop(index, None)
        if is_dead:
            # Given up meanwhile: what removed the other pieces did not see this one.
            with suppress(BackendError):
                self._values.delete(key, what)
            self._refuse("write")

    def _finish(self, what: str) -> None:
        """Store what is in memory still, and make the object visible."""
        fault = self._coverage.missing(self._extent.length)
        if fault:
            raise BackendError(f"{what}: {fault}; write every byte first")
        value = self._only_value()
        pieces = None
        if value is None:
            if not self._name:
                self._begin()
            for index, piece in sorted(self._filling.items()):
                self._put(index, memoryview(piece.data), what)
            size = min(self._piece_bytes, self._coverage.end)
            pieces = Pieces(folder_of(self._key), self._name, self._coverage.end, size)
            value = memoryview(pieces.head())
        if_absent = self._publish is Publish.IF_ABSENT
        replaced = None if if_absent else self._values.pieces_of(self._key, what)
        try:
            is_new = self._values.put(self._key, value, what, if_absent=if_absent)
        except BaseException as error:
            is_answer = isinstance(error, BackendError) and not error.retryable
            self._is_unanswered = self._is_unanswered or not is_answer
            raise
        self._is_unanswered = False
        if not is_new:
            raise KeyExistsError(f"{what}: the key is taken")
        if replaced != pieces:
            # No head names them any more: what fails here is left to discard_unfinished.
            with suppress(BackendError):
                self._values.delete_pieces(replaced, what)

    def _only_value(self) -> memoryview | None:
        """Return the object where it is stored as one value; not where it could be taken for a head."""
        if self._stored or self._coverage.end > (self._values.value_bytes or 1 << 62):
            return None
        value = memoryview(self._filling[0].data if self._filling else b"")
        return None if value[: len(MAGIC)] == MAGIC else value

    def _die(self) -> None:
        """Leave nothing; where the store cannot be asked, it is left to ``discard_unfinished``."""
        with self._lock:
            self._state = _State.DEAD
            self._filling.clear()
            stored = sorted(self._stored)
        # Where the answer to publish did not come, the object may be visible, or become so: its pieces stay.
        if not self._is_unanswered:
            with suppress(BackendError):
                for index in stored:
                    key = f"{folder_of(self._key)}{self._name}/{index:08d}"
                    self._values.delete(key, self._backend.what("abort", self._key))
        self._backend.living.discard(self._name)

    def _check_open(self, operation: str) -> None:
        if self._state is not _State.OPEN:
            self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        what = self._backend.what(operation, self._key)
        raise BackendError(f"{what}: this writer is {self._state}; create a new one")


def _stored(value: StoredObject, pieces: Pieces | None) -> StoredObject:
    """Describe an object by the value under its key, or by its pieces; their name is another for each writer."""
    if pieces is None:
        return value
    return StoredObject(key=value.key, bytes=pieces.length, version=pieces.name)
