"""The two small files of a run beside its checkpoints: the tier record, which identifies the tier, and ``latest``,
which names the newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from tierfall.core.format.documents import read_twice
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
    by key where a listing does not show it. Without ``kept`` the file is neither written nor read."""

    def __init__(self, documents: Documents, *, kept: bool) -> None:
        self._documents = documents
        self._key = f"{documents.run}/{keys.LATEST_NAME}"
        self._kept = kept

    def write(self, checkpoint: CheckpointId) -> None:
        if self._kept:
            self._documents.replace(self._key, f"{keys.step_folder(checkpoint)}\n".encode())

    def read(self, listed_bytes: int | None = None) -> CheckpointId | None:
        """Read it; None where it is missing or names no checkpoint. ``listed_bytes`` is its size by a listing."""
        if not self._kept:
            return None
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
