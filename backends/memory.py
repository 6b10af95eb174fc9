"""A backend in this process's memory, for tests, examples and simulations; its traits are not durable."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierfall.backends.toolkit.key_value import KeyValueBackend
from tierfall.backends.toolkit.keys import check_key
from tierfall.backends.toolkit.store import KeyValueStore
from tierfall.core.types.backend import StoredObject


class MemoryStore(KeyValueStore):
    """Values in a dictionary. A value is never changed in place, so that readers need no lock."""

    durable = False
    conditional_create = True
    value_bytes = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        self._written = 0

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self.objects.get(key)

    def put(self, key: str, value: memoryview, if_absent: bool) -> bool:
        data = bytes(value)
        with self._lock:
            if if_absent and key in self.objects:
                return False
            self.objects[key] = data
            self._written += 1
            self._versions[key] = self._written
        return True

    def delete(self, key: str) -> None:
        with self._lock:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> Iterable[StoredObject]:
        with self._lock:
            return [
                StoredObject(key=key, bytes=len(data), version=str(self._versions.get(key, "")))
                for key, data in self.objects.items()
                if key.startswith(prefix)
            ]


class MemoryBackend(KeyValueBackend):
    """Stores objects in a dictionary; ``place`` names it in messages. ``close`` keeps the objects, and the backend
    stays usable."""

    def __init__(self, place: str = "memory") -> None:
        self.store = MemoryStore()
        self._objects = self.store.objects  # for tests that inspect and damage objects
        super().__init__(self.store, place=place)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. Deletes all of them."""
        for key in [check_key(key) for key in keys]:
            self.delete(key)
        return ()
