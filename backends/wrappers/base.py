"""Wrappers: a backend around a backend. ``Wrapper`` passes every call on; retry, bounds and faults derive from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from tierfall.backends.toolkit.base import AbortOnExit
from tierfall.core.types.backend import (
    Backend,
    Publish,
    StoredObject,
    SyncedBackend,
    Traits,
    Writer,
)

T = TypeVar("T")


class Wrapper:
    """Passes every call on to ``inner``: those that may be repeated, by ``call``, which a subclass may override."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        """Make a call to ``inner`` that moves ``bytes``; ``doing`` names it for messages."""
        return function()

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def place(self) -> str:
        return self._inner.place

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        writer = self.call(
            "write",
            lambda: self._inner.create(key, length=length, length_max=length_max, publish=publish),
        )
        return self.writer(writer, key, publish)

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        """Wrap a writer that ``create`` has made."""
        return inner

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.call("read", lambda: self._inner.read_into(key, offset, view), bytes=view.nbytes)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        return self._inner.read_cached(key, offset, end, views)

    def stat(self, key: str) -> StoredObject:
        return self.call("read", lambda: self._inner.stat(key))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return self._inner.scan(prefix)

    def delete(self, key: str) -> None:
        self.call("delete", lambda: self._inner.delete(key))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        return self.call("delete", lambda: self._inner.delete_some(keys))

    def sync(self, folder: str) -> None:
        self.call("fsync", lambda: cast(SyncedBackend, self._inner).sync(folder))

    def discard_unfinished(self, prefix: str) -> int:
        return self.call("delete", lambda: self._inner.discard_unfinished(prefix))

    def close(self) -> None:
        self._inner.close()


class WriterWrapper(AbortOnExit):
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, offset: int, view: memoryview) -> None:
        self._inner.write(offset, view)

    def publish(self) -> None:
        self._inner.publish()

    def abort(self) -> None:
        self._inner.abort()
