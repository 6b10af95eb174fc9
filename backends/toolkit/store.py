"""A store of named values as a plug-in describes it, and how an object is stored as values.

An object of up to ``value_bytes`` is one value under its key. A longer object is cut into pieces of that size, each a
value under a name that no key has. A head, which names the pieces, is stored under the key last. So an object appears
atomically, and its length need not be known in advance. Pieces that no head names were left by a dead writer.
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierfall.backends.toolkit.keys import is_unfinished
from tierfall.backends.toolkit.views import flat
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    KeyNotFoundError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.text import signature_fault

VALUE_BYTES = 4 * 1024 * 1024
VALUE_BYTES_MIN = 4096
_PIECES_MAX = 10**8
_PARAMETERS = {
    "get": "(key)",
    "put": "(key, value, if_absent)",
    "delete": "(key)",
    "list": "(prefix)",
    "error_type": "(error)",
    "close": "()",
}
MAGIC = b"tierfall pieces 1 "
_HEAD = re.compile(re.escape(MAGIC) + rb"(\S+) +([0-9]+) +([0-9]+)\n\Z")
HEAD_BYTES = len(MAGIC) + 46 + 1 + 20 + 1 + 20 + 1


class KeyValueStore(ABC):
    """A store of named values, as a plug-in describes it to ``KeyValueBackend``. All methods may be called from several
    threads at once. A key is a text of up to 1,100 bytes in UTF-8, with '/' in it.

    A subclass sets what the store promises. ``durable``: a value that ``put`` has stored, and a deletion, survive a
    power cut. ``conditional_create``: of several ``put`` with ``if_absent``, in any processes, one stores its value.
    ``value_bytes``: the longest value, 4096 bytes or more (None: no limit, for a store whose ``get`` copies nothing,
    since it is called to read any range). ``max_parallel``: calls that usefully run at once.

    A method raises a BackendError, or an exception of its library, which ``error_type`` classifies.
    """

    durable: bool
    conditional_create: bool
    value_bytes: int | None = VALUE_BYTES
    max_parallel: int = 4

    @abstractmethod
    def get(self, key: str) -> bytes | bytearray | memoryview | None:
        """Return a value; None only if the store answered that there is none."""

    @abstractmethod
    def put(self, key: str, value: memoryview, if_absent: bool) -> bool:
        """Store a value atomically: a concurrent reader gets the old one or the new one, whole. With ``if_absent``,
        return False and change nothing if the key has a value; else return True. The memory of ``value`` (bytes,
        read-only) is reused after the call: keep a copy, not the view."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a value. A missing one is no error."""

    @abstractmethod
    def list(self, prefix: str) -> Iterable[StoredObject]:
        """Return every key that begins with ``prefix``, with the length of its value in bytes, in any order; all keys
        if ``prefix`` is empty."""

    def error_type(self, error: Exception) -> type[BackendError]:
        """Choose the class of the error that replaces an exception of the store's library. UnreachableError: nothing is
        known of what is stored, and the call is retried. BackendError: the store refused the call for good.

        By default an OSError is UnreachableError, StorageFullError (ENOSPC, EDQUOT) or AccessDeniedError
        (PermissionError), and any other exception BackendError."""
        if not isinstance(error, OSError):
            return BackendError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError
        return AccessDeniedError if isinstance(error, PermissionError) else UnreachableError

    def close(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Release the store's resources, such as connections. By default there are none."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of an object: their ``name`` in the key's folder, the object's length, and the length of each piece
    but the last."""

    folder: str
    name: str
    length: int
    piece_bytes: int

    @classmethod
    def read(cls, key: str, value: memoryview, what: str) -> Pieces | None:
        """Parse a head; None if the value is the object itself."""
        if value[: len(MAGIC)] != MAGIC:
            return None
        found = _HEAD.match(bytes(value[: HEAD_BYTES + 1]))
        name = found[1].decode() if found else ""
        length, piece_bytes = (int(found[2]), int(found[3])) if found else (0, 0)
        if not is_unfinished(name) or not 0 < length <= piece_bytes * _PIECES_MAX:
            raise BackendError(f"{what}: it is damaged: it begins like a head and is none")
        return cls(folder_of(key), name, length, piece_bytes)

    def head(self) -> bytes:
        head = f"{self.name:<46} {self.length:>20} {self.piece_bytes:>20}\n"
        return MAGIC + head.encode()

    def keys(self) -> Iterator[str]:
        yield from map(self.key, range(-(-self.length // self.piece_bytes)))

    def key(self, index: int) -> str:
        return f"{self.folder}{self.name}/{index:08d}"

    def size(self, index: int) -> int:
        return min(self.piece_bytes, self.length - index * self.piece_bytes)


class Values:
    """A store's values. Exceptions of the store are raised as BackendErrors, in which ``what`` is the operation, key
    and place.

    Raises ConfigError where the store lacks a method or attribute, naming it.
    """

    def __init__(self, store: KeyValueStore) -> None:
        _check_store(store)
        self._store = store

    @property
    def value_bytes(self) -> int | None:
        return self._store.value_bytes

    def get(self, key: str, what: str) -> memoryview | None:
        """Return a value as a flat view; None where there is none."""
        with self._translated(what):
            value = self._store.get(key)
            if value is None:
                return None
            if not isinstance(value, bytes | bytearray | memoryview):
                raise BackendError(
                    f"{what}: {self._name}.get returned {value!r:.40}; expected bytes, or None where there is no value"
                )
            return flat(memoryview(value))

    def find(self, key: str, what: str) -> tuple[memoryview, Pieces | None]:
        """Return the value under an object's key, and its pieces if the value is a head. Raises KeyNotFoundError."""
        value = self.get(key, what)
        if value is None:
            raise KeyNotFoundError(f"{what}: there is no such object")
        return value, Pieces.read(key, value, what)

    def pieces_of(self, key: str, what: str) -> Pieces | None:
        """Return the pieces of the object under a key; None where it has none or is missing."""
        try:
            return self.find(key, what)[1]
        except KeyNotFoundError:
            return None

    def put(self, key: str, value: memoryview, what: str, *, if_absent: bool = False) -> bool:
        """Store a value; return False if ``if_absent`` found one."""
        with self._translated(what):
            is_new = self._store.put(key, value.toreadonly(), if_absent)
            if if_absent and not isinstance(is_new, bool):
                raise BackendError(
                    f"{what}: {self._name}.put returned {is_new!r:.40}; expected True, or False where if_absent "
                    "finds a value"
                )
        return is_new or not if_absent

    def delete(self, key: str, what: str) -> None:
        with self._translated(what):
            self._store.delete(key)

    def delete_pieces(self, pieces: Pieces | None, what: str) -> None:
        for key in pieces.keys() if pieces else ():
            self.delete(key, what)

    def list(self, prefix: str, what: str) -> list[StoredObject]:
        with self._translated(what):
            found = list(self._store.list(prefix))
            for each in found:
                if not isinstance(each, StoredObject):
                    raise BackendError(
                        f"{what}: {self._name}.list returned {each!r:.40}; expected a StoredObject(key=..., bytes=...) "
                        "for each key"
                    )
            return [each for each in found if each.key.startswith(prefix)]

    def close(self, what: str) -> None:
        with self._translated(what):
            self._store.close()

    @property
    def _name(self) -> str:
        return type(self._store).__name__

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Raise exceptions of the store's library as ``error_type`` classifies them."""
        try:
            yield
        except TierfallError:
            raise
        except Exception as error:
            raise self._store.error_type(error)(f"{what}: {error!r}") from error


def folder_of(key: str) -> str:
    folder, slash, _ = key.rpartition("/")
    return folder + slash


def piece_of(key: str) -> str | None:
    """Return the folder and name of the pieces that a key belongs to; None if it is no piece's key."""
    name, _, index = key.rpartition("/")
    return name if is_unfinished(name.rpartition("/")[2]) and index.isdigit() else None


def _check_store(store: KeyValueStore) -> None:
    name = type(store).__name__
    if not isinstance(store, KeyValueStore):
        raise ConfigError(f"KeyValueBackend: {name} is no KeyValueStore; derive the class from it")
    for method, expected in _PARAMETERS.items():
        if fault := signature_fault(getattr(store, method), expected):
            raise ConfigError(f"KeyValueBackend: {name}.{method}: {fault}")
    for promise in ("durable", "conditional_create"):
        if not isinstance(getattr(store, promise, None), bool):
            raise ConfigError(
                f"KeyValueBackend: {name} does not set {promise}; expected {promise} = True or False in the class"
            )
    limit = store.value_bytes
    if limit is not None and limit < VALUE_BYTES_MIN:
        raise ConfigError(
            f"KeyValueBackend: {name}.value_bytes is {limit}; expected {VALUE_BYTES_MIN} or more, or None"
        )
