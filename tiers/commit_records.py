"""The commit records of a tier: each is read once, and kept for as long as listings show it unchanged.

A record that could not be read, or is damaged, is not kept: the next listing reads it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierfall.core.format.records import Commit
from tierfall.core.runtime.bounded_calls import run_in_parallel
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
)
from tierfall.core.types.values import CheckpointId

Read = Callable[[CheckpointId, int | None], Commit]
Found = Commit | IntegrityError | NotSupportedError | None
"""A record, what is wrong with it, or None where it went while the listing went on."""


class CommitRecords:
    """See the module. ``read`` reads a record, of so many bytes where that is known. May be used by several threads."""

    def __init__(self, read: Read, *, parallel: int) -> None:
        self._read = read
        self._parallel = parallel
        self._kept: dict[CheckpointId, tuple[tuple[int, str], Commit]] = {}

    def forget(self, checkpoint: CheckpointId) -> None:
        self._kept.pop(checkpoint, None)

    def find(self, listed: Mapping[CheckpointId, StoredObject]) -> dict[CheckpointId, Found]:
        """Return the records that a listing has shown; what is not known as it is listed is read, several at a time.
        Raises the error of a tier that did not answer."""
        kept = {
            id: record
            for id, (was, record) in list(self._kept.items())
            if id in listed and was == _as_listed(listed[id])
        }
        new = [id for id in listed if id not in kept]
        found = dict(
            zip(
                new,
                run_in_parallel(
                    lambda id: self._find(id, listed[id].bytes), new, parallel=self._parallel
                ),
                strict=True,
            )
        )
        read = {id: record for id, record in found.items() if isinstance(record, Commit)}
        self._kept = {
            id: (_as_listed(listed[id]), record) for id, record in {**kept, **read}.items()
        }
        return {id: kept[id] if id in kept else found[id] for id in listed}

    def find_one(self, id: CheckpointId, listed: StoredObject) -> Found:
        """Do so for one, and keep what is known of others."""
        was, record = self._kept.get(id, (None, None))
        if record is not None and was == _as_listed(listed):
            return record
        found = self._find(id, listed.bytes)
        if isinstance(found, Commit):
            self._kept[id] = (_as_listed(listed), found)
        return found

    def _find(self, id: CheckpointId, size: int) -> Found:
        try:
            return self._read_as_listed(id, size)
        except KeyNotFoundError:
            return None
        except (IntegrityError, NotSupportedError) as error:
            return error

    def _read_as_listed(self, id: CheckpointId, size: int) -> Commit:
        """A record that is not as long as the listing said, or damaged, is looked at once more by itself."""
        try:
            return self._read(id, size)
        except KeyNotFoundError:
            raise
        except (IntegrityError, BackendError) as error:
            if isinstance(error, BackendError) and error.retryable:
                raise
        return self._read(id, None)


def _as_listed(stored: StoredObject) -> tuple[int, str]:
    return stored.bytes, stored.version
