"""Deleting checkpoints of one run from one tier: the commit record first, then the rest of the folder.

Each request that deletes comes after a fence check. Files that tierfall did not write are never deleted.
"""

from __future__ import annotations

import logging
from itertools import groupby

from tierfall.core.format.records import Attempt, Commit, prevents_deletion
from tierfall.core.types import keys
from tierfall.core.types.backend import delete_all
from tierfall.core.types.errors import (
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    StorageFullError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.attempts import Fence, LineageRecords
from tierfall.tiers.documents import Documents
from tierfall.tiers.listing import TierCatalog
from tierfall.tiers.marks import Marks
from tierfall.tiers.run_files import LatestHint

logger = logging.getLogger("tierfall")


class TierDeletions:
    """Deletes what one run has on one tier. ``attempt`` is that of the process that asks, None for a person's command.
    Every method raises FencedError, and deletes nothing from then on, where a newer attempt exists."""

    def __init__(
        self,
        documents: Documents,
        catalog: TierCatalog,
        marks: Marks,
        fence: Fence,
        lineage: LineageRecords,
        latest: LatestHint,
    ) -> None:
        self._tier = documents.tier
        self._run = documents.run
        self._backend = documents.backend
        self._catalog = catalog
        self._marks = marks
        self._fence = fence
        self._lineage = lineage
        self._latest = latest

    def drop(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        tombstoned: bool,
        next_latest: CheckpointId | None,
        ignore_marks: bool,
    ) -> frozenset[str]:
        """Delete a checkpoint unless its marks forbid it; see ``StoredTier.delete``."""
        marks = frozenset() if ignore_marks else self._marks.of(checkpoint)
        if prevents_deletion(marks, tombstoned=tombstoned):
            return marks
        doing = f"drop of {checkpoint}"
        postponed = None
        if self._latest.read() == checkpoint:
            has_next = next_latest is not None and self._catalog.is_committed(next_latest)
            self._fence.check_newest(attempt, doing=doing)
            if next_latest is None or not has_next:
                self._latest.delete()
            elif not self._latest.write_or_delete(next_latest):
                postponed = next_latest
        if not ignore_marks:
            self._record_lineage(checkpoint)
        self._fence.check_newest(attempt, doing=doing)
        self._catalog.forget(checkpoint)
        self._backend.delete(keys.step_prefix(self._run, checkpoint) + keys.COMMIT_NAME)
        self.discard(checkpoint, attempt=attempt)
        if postponed is not None:
            self._latest.rewrite(postponed, self._catalog.is_committed)
        return marks

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Delete an uncommitted step folder, or one shard's files in it. The files of active writers are kept then, as
        other ranks may be writing there; marks go with the last image."""

        def check() -> None:
            self._fence.check_newest(attempt, doing=f"deletion of what is left of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        found = [f.key for f in self._catalog.files(checkpoint) if keys.is_tierfall_name(f.key)]
        selected = [name for name in found if shard is None or keys.parse_shard(name) == shard]
        others = set(found) - set(selected)
        if all(name.startswith(f"{keys.MARKS_FOLDER}/") for name in others):
            selected += others
        delete_all(self._backend, [prefix + name for name in selected], before=check)
        if shard is None:
            check()
            self._backend.discard_unfinished(prefix)

    def delete_run(self) -> None:
        """Delete all that tierfall has written of the run; what names a checkpoint goes first, the tier's id last."""
        prefix = f"{self._run}/"
        found = [stored.key.removeprefix(prefix) for stored in self._backend.scan(prefix)]
        own = sorted(filter(keys.is_run_file, found), key=_order_of_deletion)
        for _, names in groupby(own, _order_of_deletion):
            delete_all(self._backend, [prefix + name for name in names])
        if own:
            self._backend.discard_unfinished(prefix)

    def delete_other_codecs(self, commit: Commit, *, attempt: Attempt) -> None:
        """Delete the files of images that were stored with another codec before."""
        checkpoint = commit.lineage.checkpoint

        def check() -> None:
            self._fence.check_newest(attempt, doing=f"deletion of older files of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        kept = {file.name for file in commit.files}
        shards = {keys.parse_shard(name) for name in kept} - {None}
        names = [file.key for file in self._catalog.files(checkpoint)]
        others = [n for n in names if n not in kept and keys.parse_shard(n) in shards]
        delete_all(self._backend, [prefix + name for name in others], before=check)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Delete what writers of earlier starts left unpublished; return how many."""
        self._fence.check_newest(attempt, doing="deletion of unfinished files")
        return self._backend.discard_unfinished(f"{self._run}/")

    def _record_lineage(self, checkpoint: CheckpointId) -> None:
        """Record how the attempt of a checkpoint began; the checkpoint may be its last."""
        if self._lineage.has(checkpoint.attempt):
            return
        try:
            commit = self._catalog.read_commit(checkpoint)
        except (KeyNotFoundError, IntegrityError, NotSupportedError):
            return  # an unreadable commit record does not say how the attempt began
        try:
            self._lineage.create(commit)
        except StorageFullError as error:  # the deletion frees space
            logger.warning(
                "%s: how attempt %d began is not recorded: %s",
                self._tier, checkpoint.attempt, error,
            )  # fmt: skip


def _order_of_deletion(name: str) -> int:
    """Return when a file is deleted: first the files that name a checkpoint, then commit records, then the rest, last
    the tier record. After a kill, no file names a checkpoint that is gone, and no commit record lacks its files."""
    folder, _, leaf = name.rpartition("/")
    if name == keys.LATEST_NAME or folder == keys.LINEAGE_FOLDER:
        return 0
    return 1 if leaf == keys.COMMIT_NAME else 3 if name == keys.TIER_NAME else 2
