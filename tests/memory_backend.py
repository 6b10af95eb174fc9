"""A backend in this process's memory, over the contract of a plug-in; its traits are not durable."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import StoreClient
from tierfall.backends.toolkit.keys import check_key
from tierfall.backends.toolkit.object_store import ObjectStore
from tierfall.core.types.backend import StoredObject


class MemoryStore(ObjectStore):
    """Objects in a dictionary. One is never changed in place, so that readers need no lock."""

    durable = False
    conditional_create = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        self._written = 0

    def get(self, key: str, start: int, end: int) -> tuple[memoryview, int] | None:
        with self._lock:
            data = self.objects.get(key)
        return None if data is None else (memoryview(data)[start:end], len(data))

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        copy = bytes(data)
        with self._lock:
            if if_absent and key in self.objects:
                return False
            self.objects[key] = copy
            self._written += 1
            self._versions[key] = self._written
        return True

    def delete(self, key: str) -> None:
        with self._lock:
            self.objects.pop(key, None)

    def list(self, prefix: str, delimiter: str) -> Iterable[StoredObject]:
        with self._lock:
            return [
                StoredObject(key=key, bytes=len(data), version=str(self._versions.get(key, "")))
                for key, data in self.objects.items()
                if key.startswith(prefix)
            ]


class MemoryBackend(ObjectStoreBackend):
    """Stores objects in a dictionary; ``place`` names it in messages. ``close`` keeps the objects, and the backend
    stays usable."""

    def __init__(self, place: str = "memory") -> None:
        self.store = MemoryStore()
        self._objects = self.store.objects  # for tests that inspect and damage objects
        super().__init__(StoreClient(self.store, place=place))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. Deletes all of them."""
        for key in [check_key(key) for key in keys]:
            self.delete(key)
        return ()
