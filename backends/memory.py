"""Objects in this process's memory: for tests, examples and simulations, and honest about that in its traits.

A published object is never changed in place, so a reader that holds one needs no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from tierfall.backends.toolkit.coverage import Coverage, Extent
from tierfall.backends.toolkit.frame import AbortsOnLeave
from tierfall.backends.toolkit.keys import check_key, check_prefix
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, Stored, Traits
from tierfall.core.types.errors import BackendError, KeyExistsError, KeyNotFoundError

_TRAITS = Traits(durable=False, atomic_replace=True, conditional_create=True)


class MemoryBackend:
    """Stores objects in a dictionary; ``place`` is what messages call it."""

    def __init__(self, place: str = "memory") -> None:
        self._place = place
        self._lock = threading.Lock()
        self._objects: dict[str, memoryview] = {}
        self._versions: dict[str, str] = {}
        self._written = 0

    @property
    def traits(self) -> Traits:
        return _TRAITS

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
    ) -> MemoryWriter:
        check_key(key)
        extent = Extent(length=length, length_max=length_max)
        extent.check(f"create {key!r} in {self._place}")
        return MemoryWriter(self, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        data = flat(view, writable=True)
        found = self._find("read", key)
        if offset < 0 or offset + data.nbytes > max(found.nbytes, offset):
            raise BackendError(
                f"read {key!r} in {self._place}: bytes {offset} to {offset + data.nbytes} were asked for, but it has "
                f"{found.nbytes}"
            )
        copy_bytes(data, found[offset : offset + data.nbytes])

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        check_key(key)
        return False

    def stat(self, key: str) -> Stored:
        return Stored(key=key, bytes=self._find("stat", key).nbytes)

    def scan(self, prefix: str) -> Iterator[Stored]:
        check_prefix(prefix)
        with self._lock:
            found = [
                Stored(key=key, bytes=data.nbytes, version=self._versions.get(key, ""))
                for key, data in self._objects.items()
                if key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda each: each.key))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        for key in keys:
            check_key(key)
        for key in keys:
            self.delete(key)
        return ()

    def discard_unfinished(self, prefix: str) -> int:
        """Return 0: what a writer never published goes with the writer."""
        check_prefix(prefix)
        return 0

    def close(self) -> None:
        """Keep the objects: whoever holds this backend may go on using it."""

    def put(self, key: str, data: memoryview, *, publish: Publish) -> None:
        """Make an object visible; the data must not be changed any more."""
        with self._lock:
            if publish is Publish.IF_ABSENT and key in self._objects:
                raise KeyExistsError(f"publish {key!r} in {self._place}: the key is taken")
            self._objects[key] = data
            self._written += 1
            self._versions[key] = str(self._written)

    def _find(self, operation: str, key: str) -> memoryview:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise KeyNotFoundError(f"{operation} {key!r} in {self._place}: there is no such object")
        return found


class MemoryWriter(AbortsOnLeave):
    """Fills one new object; see ``core.contracts.Writer``. One lock for everything: it is not for speed."""

    def __init__(
        self, backend: MemoryBackend, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        self._backend = backend
        self._key = key
        self._extent = extent
        self._publish = publish
        self._lock = threading.Lock()
        self._coverage = Coverage()
        self._data: bytearray | None = bytearray(extent.length or 0)

    def write(self, offset: int, view: memoryview) -> None:
        with self._lock:
            data = self._living("write")
            try:
                self._put(data, offset, flat(view))
            except BaseException:
                self._data = None
                raise

    def publish(self) -> None:
        with self._lock:
            data = self._living("publish")
            self._data = None
            fault = self._coverage.missing(self._extent.length)
            if fault:
                raise BackendError(f"{self._what('publish')}: {fault}; write every byte first")
            self._backend.put(self._key, memoryview(data).toreadonly(), publish=self._publish)

    def abort(self) -> None:
        with self._lock:
            self._data = None

    def _put(self, data: bytearray, offset: int, source: memoryview) -> None:
        end = offset + source.nbytes
        self._extent.check_range(self._what("write"), offset, source.nbytes)
        if end > len(data):
            data.extend(bytes(end - len(data)))
        with memoryview(data) as target:
            copy_bytes(target[offset:end], source)
        self._coverage.add(offset, end)

    def _living(self, operation: str) -> bytearray:
        if self._data is None:
            raise BackendError(
                f"{self._what(operation)}: this writer is published or dead; create a new one"
            )
        return self._data

    def _what(self, operation: str) -> str:
        return f"{operation} {self._key!r} in {self._backend.place}"
