"""What tasks call of a stored tier. ``tiers/stored.py:StoredTier`` implements it. All methods block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tierfall.core.copies.image_writes import WritableStore
from tierfall.core.copies.images import ReadableStore
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.records import Attempt, Commit, Mark
from tierfall.core.types.values import CheckpointId, Shard


class TaskStore(ReadableStore, WritableStore, Protocol):
    """See the module."""

    def list(self) -> Listing: ...

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def is_committed(self, checkpoint: CheckpointId) -> bool: ...

    def find_copy(self, checkpoint: CheckpointId) -> FoundCopy | None: ...

    def sync_commit(self, checkpoint: CheckpointId) -> None: ...

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None: ...

    def check_begin(self, attempt: Attempt) -> None: ...

    def check_newest(self, attempt: Attempt | None, *, doing: str = ...) -> None: ...

    def commit(
        self,
        commit: Commit,
        *,
        attempt: Attempt,
        marks: tuple[Mark, ...] = (),
        repairs: bool = False,
    ) -> None: ...

    def write_latest(self, checkpoint: CheckpointId) -> None: ...

    def add_mark(self, mark: Mark) -> None: ...

    def remove_mark(self, checkpoint: CheckpointId, name: str) -> None: ...

    def read_marks(
        self, checkpoints: Iterable[CheckpointId]
    ) -> dict[CheckpointId, frozenset[str]]: ...

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        tombstoned: bool = False,
        next_latest: CheckpointId | None = None,
        ignore_marks: bool = False,
    ) -> frozenset[str]: ...

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None: ...
