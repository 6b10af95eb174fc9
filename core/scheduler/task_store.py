"""What tasks call of a stored tier. ``tiers/stored.py:StoredTier`` implements it. All methods block."""

from __future__ import annotations

from typing import Protocol

from tierfall.core.copies.image_writes import ImageUpload, WritableStore
from tierfall.core.copies.images import ReadableStore
from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Attempt, Commit, Geometry
from tierfall.core.types.values import CheckpointId, Shard


class DecidedStore(Protocol):
    """A tier's list of what is decided: ``tiers/decided.py:DecidedFolder``."""

    def read(self, *, max_age_s: float = ...) -> DecidedList: ...

    def add(self, entry: Decided) -> None: ...


class TaskStore(ReadableStore, WritableStore, Protocol):
    """See the module."""

    def create_shard(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        *,
        attempt_id: str | None = None,
    ) -> ImageUpload: ...

    @property
    def decided(self) -> DecidedStore: ...

    def list(self) -> Listing: ...

    def read_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def written_commit(self, checkpoint: CheckpointId) -> Commit: ...

    def is_committed(self, checkpoint: CheckpointId) -> bool: ...

    def find_copy(self, checkpoint: CheckpointId, *, batch: int = ...) -> FoundCopy | None: ...

    def sync_commit(self, checkpoint: CheckpointId) -> None: ...

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None: ...

    def check_begin(self, attempt: Attempt) -> None: ...

    def check_newest(self, attempt: Attempt | None, *, doing: str = ...) -> None: ...

    def commit(self, commit: Commit, *, attempt: Attempt) -> None: ...

    def note_damaged(self, commit: Commit, why: str) -> None: ...

    def write_latest(self, checkpoint: CheckpointId) -> None: ...

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        batch: int = ...,
        next_latest: CheckpointId | None = None,
    ) -> DecidedList | None: ...

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None: ...
