"""The small files of a run beside its checkpoints: the tier record, which identifies the tier, ``latest``, which names
the newest checkpoint, and the list of what is decided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.documents import JsonFields, open_sealed, read_twice
from tierfall.core.format.records import TierRecord, parse_tier_record
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    AccessDeniedError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.documents import Documents

logger = logging.getLogger("tierfall")

SetIdentityCheck = Callable[[str, Callable[[bytes], bool]], None]


class ContradictionError(UnreachableError):
    """A listing shows a key, and the store answers that it is absent: what is there could not be read."""


class TierRecordFile:
    """The tier record of one run on one tier; ``last`` is the one that was read or written last."""

    def __init__(
        self,
        documents: Documents,
        set_identity_check: SetIdentityCheck | None,
        last: TierRecord | None,
    ) -> None:
        self._documents = documents
        self._set_identity_check = set_identity_check
        self._key = f"{documents.run}/{keys.TIER_NAME}"
        self.last = last

    def read(self) -> TierRecord | None:
        """Read the tier record; None where there is none yet."""
        try:
            try:
                self.last = self._read_once()
            except IntegrityError:  # another rank may have replaced it since the stat
                self.last = read_twice(self._read_once)
        except KeyNotFoundError:
            return None
        return self.last

    def confirm_absence(self, error: KeyNotFoundError, key: str | None = None) -> None:
        """Raise UnreachableError if the tier record cannot be read: the answer that a key is absent (``error``) then
        says nothing of the tier. Raise ContradictionError if a listing of now shows ``key``. On a tier that never had a
        record, and whose listing shows none, the answer stands."""
        known = self.last
        try:
            is_there = self.read() is not None or (known is None and not self._is_listed(self._key))
            why = "" if is_there else "it is not there either"
        except TierfallError as unread:
            why = str(unread)
        if why:
            raise UnreachableError(
                f"{error}; and {self._documents.what(self._key)}, which tells this tier from others, could not be "
                f"read: {why}"
            ) from error
        if key is not None and self._is_listed(key):
            raise ContradictionError(
                f"{error}; and the listing of {self._documents.tier} shows it: the store contradicts itself"
            ) from error

    def _is_listed(self, key: str) -> bool:
        folder = key.rpartition("/")[0]
        return any(stored.key == key for stored in self._documents.backend.scan(f"{folder}/"))

    def _read_once(self) -> TierRecord:
        return parse_tier_record(
            self._documents.read(self._key), what=self._documents.what(self._key)
        )

    def write(self, record: TierRecord, *, again: bool = False) -> TierRecord:
        """Create the tier record, or return the one that exists; ``again`` replaces it."""
        try:
            (self._documents.replace if again else self._documents.create)(
                self._key, record.encode()
            )
        except KeyExistsError as error:
            found = self.read()
            if found is None:
                raise AccessDeniedError(
                    f"{self._documents.what(self._key)} is no file, and the record that tells this tier from others is "
                    f"to be there: move away what is there in {self._documents.backend.place}"
                ) from error
            return found
        self.last = record
        return record

    def recreate(self) -> None:
        """Create the record again that was read or written last, where it was deleted. One that exists is kept: it may
        be of a start that found the tier empty."""
        if self.last is not None:
            with suppress(KeyExistsError):
                self._documents.create(self._key, self.last.encode())

    def expect(self, id: str) -> None:
        """Let a backend whose folder is mounted anew continue with a folder whose tier record has this id."""
        if self._set_identity_check is not None:
            what = self._documents.what(self._key)
            self._set_identity_check(
                self._key, lambda data: parse_tier_record(data, what=what).id == id
            )


class LatestHint:
    """The file ``latest``, which names the newest checkpoint, for people and for listings: what it names is asked for
    by key where a listing does not show it."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._key = f"{documents.run}/{keys.LATEST_NAME}"

    def write(self, checkpoint: CheckpointId) -> None:
        self._documents.replace(self._key, f"{keys.step_folder(checkpoint)}\n".encode())

    def read(self, listed_bytes: int | None = None) -> CheckpointId | None:
        """Read it; None where it is missing or names no checkpoint. ``listed_bytes`` is its size by a listing."""
        try:
            text = self._documents.read(self._key, bytes_known=listed_bytes)
            if not text.endswith(b"\n"):  # it was replaced since by a longer one
                text = self._documents.read(self._key)
        except KeyNotFoundError:
            return None
        return keys.parse_step_folder(text.decode("ascii", "replace").strip())

    def delete(self) -> None:
        self._documents.backend.delete(self._key)

    def write_or_delete(self, checkpoint: CheckpointId) -> None:
        """Write the hint; where the tier is full, delete it until the next commit. A hint must not block a deletion,
        which is what frees space on a full tier."""
        try:
            self.write(checkpoint)
        except StorageFullError:
            self.delete()
            logger.warning(
                "%s: 'latest' is missing until the next commit there", self._documents.tier
            )


class DecidedFolder:
    """The folder ``decided`` of a run on one tier: its list of what persons have decided and readers have found.

    An entry is created once, and goes only with the run. So what was read before still stands, whatever a listing
    leaves out. See ``core/format/decided.py``. May be used by several threads.
    """

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
