"""A backend over any store of named values: a plug-in writes get, put, delete and list, this module the rest.

``store`` describes how an object is stored as values. A writer keeps no more in memory than the pieces that are
partly written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tierfall.backends.toolkit.base import BackendBase, Coverage, Extent, WriterBase, WriterState
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
from tierfall.core.types.backend import Publish, StoredObject, Traits
from tierfall.core.types.errors import (
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    TruncatedError,
)


class KeyValueBackend(BackendBase):
    """A ``Backend`` over a store of named values.

    ``place`` names it in messages, such as the address, without a credential. ``read_only``: writing and deleting raise
    AccessDeniedError, and the store's ``put`` and ``delete`` are never called. Raises ConfigError where the store lacks
    a method or attribute, naming it.
    """

    def __init__(self, store: KeyValueStore, *, place: str, read_only: bool = False) -> None:
        super().__init__(place, read_only=read_only)
        self.values = Values(store)
        self.active: set[str] = set()
        """The names of the pieces of writers that are neither published nor dead."""
        self._traits = Traits(
            durable=store.durable,
            atomic_replace=True,
            conditional_create=store.conditional_create,
            max_parallel=store.max_parallel,
        )

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> KeyValueWriter:
        extent = self._check_create(key, length, length_max, publish)
        return KeyValueWriter(self, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        what = self._what("read", check_key(key))
        target = flat(view, writable=True)
        value, pieces = self.values.find(key, what)
        while True:
            length = value.nbytes if pieces is None else pieces.length
            if offset < 0 or offset + target.nbytes > max(length, offset):
                raise self._short_read(what, offset, offset + target.nbytes, length)
            if pieces is None:
                copy_bytes(target, value[offset : offset + target.nbytes])
                return
            missing = self._read_pieces(pieces, offset, target, what)
            if missing is None:
                return
            # A concurrent replacement leaves another head, a deletion none, which raises.
            previous = pieces
            value, pieces = self.values.find(key, what)
            if pieces == previous:
                raise TruncatedError(f"{what}: it is damaged: its piece {missing!r} is not there")

    def stat(self, key: str) -> StoredObject:
        value, pieces = self.values.find(key, self._what("stat", check_key(key)))
        return _stored(StoredObject(key=key, bytes=value.nbytes), pieces)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return iter(sorted(self._listed(check_prefix(prefix)), key=lambda each: each.key))

    def delete(self, key: str) -> None:
        what = self._what("delete", check_key(key))
        self._check_writable(what)
        with suppress(KeyNotFoundError):
            _, pieces = self.values.find(key, what)
            # The head first: without it, the pieces are unfinished, and collected.
            self.values.delete(key, what)
            self.values.delete_pieces(pieces, what)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        keys = [check_key(key) for key in keys]
        self.delete(keys[0])
        return keys[1:]

    def discard_unfinished(self, prefix: str) -> int:
        what = self._what("clean up", check_prefix(prefix))
        self._check_writable(what)
        found: dict[str, list[str]] = {}
        for each in self.values.list(prefix, what):
            name = piece_of(each.key)
            if name is not None:
                found.setdefault(name, []).append(each.key)
        # In this order: a writer that publishes meanwhile is still active, or its head is listed.
        kept = set(self.active)
        kept.update(stored.version for stored in self._listed(prefix))
        dead = [name for name in found if name.rpartition("/")[2] not in kept]
        for name in dead:
            for key in found[name]:
                self.values.delete(key, what)
        return len(dead)

    def close(self) -> None:
        """Close the store. Open writers cannot continue."""
        self.values.close(f"close {self._place}")

    def _read_pieces(
        self, pieces: Pieces, offset: int, target: memoryview, what: str
    ) -> str | None:
        """Fill a view from an object's pieces; return the key of a piece that is missing or has another size."""
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
        what = self._what("list", prefix)
        for each in self.values.list(prefix, what):
            if not is_key(each.key):
                continue
            if each.bytes != HEAD_BYTES:
                yield each
                continue
            with suppress(KeyNotFoundError):  # deleted since the listing
                value, pieces = self.values.find(each.key, what)
                yield _stored(
                    StoredObject(key=each.key, bytes=value.nbytes, version=each.version), pieces
                )


@dataclass(slots=True)
class _Piece:
    """A piece that is not stored yet: its bytes, and which of them were written."""

    data: bytearray = field(default_factory=bytearray)
    coverage: Coverage = field(default_factory=Coverage)


class KeyValueWriter(WriterBase):
    """Writes one new object; see ``Writer``. A piece is stored as soon as all of it was written: without a copy where
    one call writes it whole."""

    def __init__(
        self, backend: KeyValueBackend, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(key, backend.place, extent=extent, publish=publish)
        self._values = backend.values
        self._active = backend.active
        self._coverage = Coverage()
        self._filling: dict[int, _Piece] = {}
        self._stored: set[int] = set()
        self._is_unanswered = False
        self._name = ""
        limit = backend.values.value_bytes
        self._is_one_value = limit is None or (extent.length is not None and extent.length <= limit)
        # Without a limit, or below it, the object is one piece, which is complete only at publish.
        self._piece_bytes = limit if limit is not None and not self._is_one_value else 1 << 62
        if not self._is_one_value:
            self._begin()

    def write(self, offset: int, view: memoryview) -> None:
        data = flat(view)
        what = self._what("write")
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

    def _on_published(self) -> None:
        self._filling.clear()
        self._active.discard(self._name)

    def _begin(self) -> None:
        """Choose the name of the pieces, before the first one is stored."""
        self._name = unfinished_name()
        self._active.add(self._name)

    def _fill(self, offset: int, data: memoryview) -> list[tuple[int, memoryview]]:
        """Add bytes to their pieces; return the pieces that are complete now. A piece in memory is kept until it is
        stored."""
        full: list[tuple[int, memoryview]] = []
        at = 0
        while at < data.nbytes:
            index, start = divmod(offset + at, self._piece_bytes)
            part = data[at : at + self._piece_bytes - start]
            at += part.nbytes
            if index in self._stored:
                continue  # a retry of a range that extends beyond this piece
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
        """The length of a piece; the last one's is known only where the object's length is."""
        length = self._extent.length
        most_bytes = self._piece_bytes
        return most_bytes if length is None else min(most_bytes, length - index * most_bytes)

    def _put(self, index: int, value: memoryview, what: str) -> None:
        key = f"{folder_of(self._key)}{self._name}/{index:08d}"
        self._values.put(key, value, what)
        with self._lock:
            is_dead = self._state is WriterState.DEAD
            self._stored.add(index)
            self._filling.pop(index, None)
        if is_dead:
            # Aborted meanwhile: the abort did not delete this piece.
            with suppress(BackendError):
                self._values.delete(key, what)
            self._refuse("write")

    def _finish(self, what: str) -> None:
        """Store the pieces in memory, then the head, which makes the object visible."""
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
        if_absent = self._publish_mode is Publish.IF_ABSENT
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
            # No head names the replaced pieces; discard_unfinished deletes what cannot be deleted now.
            with suppress(BackendError):
                self._values.delete_pieces(replaced, what)

    def _only_value(self) -> memoryview | None:
        """Return the object's bytes if it is stored as one value, which must not begin like a head; else None."""
        if self._stored or self._coverage.end > (self._values.value_bytes or 1 << 62):
            return None
        value = memoryview(self._filling[0].data if self._filling else b"")
        return None if value[: len(MAGIC)] == MAGIC else value

    def _die(self) -> None:
        with self._lock:
            self._state = WriterState.DEAD
            self._filling.clear()
            stored = sorted(self._stored)
        # If publish got no answer, the object may be visible, or become visible: its pieces are kept.
        if not self._is_unanswered:
            with suppress(BackendError):
                for index in stored:
                    key = f"{folder_of(self._key)}{self._name}/{index:08d}"
                    self._values.delete(key, self._what("abort"))
        self._active.discard(self._name)


def _stored(value: StoredObject, pieces: Pieces | None) -> StoredObject:
    """Describe an object by its value or its pieces. Each writer has its own name of pieces, which serves as
    version."""
    if pieces is None:
        return value
    return StoredObject(key=value.key, bytes=pieces.length, version=pieces.name)
