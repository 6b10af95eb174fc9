"""The folder ``decided`` of a run on one tier: its list of what persons have decided and readers have found.

An entry is created once, and goes only with the run. So what was read before still stands, whatever a listing leaves
out. See ``core/format/decided.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.documents import JsonFields, open_sealed
from tierfall.core.types import keys
from tierfall.core.types.errors import KeyExistsError, TierfallError
from tierfall.tiers.documents import Documents


class DecidedFolder:
    """The list of one run on one tier. May be used by several threads."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._prefix = f"{documents.run}/{keys.DECIDED_FOLDER}/"
        self._guard = threading.Lock()
        self._known = DecidedList()
        self._read_s = float("-inf")
        self._batch = 0

    @property
    def known(self) -> DecidedList:
        """The list as it was read last, with what this process has added since."""
        with self._guard:
            return self._known

    def read(self, *, max_age_s: float = 0.0, batch: int = 0) -> DecidedList:
        """Read the list. The last listing serves if it is younger than ``max_age_s`` seconds and, for a deletion of a
        ``batch`` (0: none), another one of that batch has read it. Raises BackendError."""
        began_s = time.monotonic()
        with self._guard:
            is_young = began_s - self._read_s < max_age_s
            if is_young and batch in (0, self._batch):
                return self._known
        found = self._documents.backend.scan(self._prefix)
        known = self.note((stored.key.removeprefix(self._prefix) for stored in found), began_s)
        if batch:
            with self._guard:
                self._batch = batch
        return known

    def note(self, names: Iterable[str], began_s: float) -> DecidedList:
        """Note the names in a listing that began at ``began_s`` on the monotonic clock; return the list."""
        found = DecidedList.parse(names)
        with self._guard:
            self._known |= found
            self._read_s = max(self._read_s, began_s)
            return self._known

    def add(self, entry: Decided, *, reason: str = "") -> None:
        """Create an entry, durable on return. One that is there already is what was asked for."""
        key = self._prefix + entry.name
        try:
            self._documents.create(key, entry.encode(reason, time.time()))
        except KeyExistsError:
            self._documents.sync(key)
        with self._guard:
            self._known |= DecidedList([entry])

    def reason(self, entry: Decided) -> str:
        """Read the reason that an entry gives; it counts even if that cannot be read."""
        key = self._prefix + entry.name
        what = self._documents.what(key)
        try:
            members = open_sealed(self._documents.read(key), what=what)
            return str(JsonFields(members, what).get("reason", str))
        except TierfallError:
            return f"its entry {keys.DECIDED_FOLDER}/{entry.name} cannot be read"
