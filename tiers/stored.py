"""A tier that keeps checkpoints in a backend: local NVMe, a parallel file system, an object store.

It owns the names and the order in which a checkpoint comes to exist: images, manifests, then the commit record. It
lists what it has as a ``TierCatalog``. It makes no decisions, and imports no backend.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from itertools import groupby

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.format.commit_files import same_checkpoint, shards_of
from tierfall.core.format.decided import FENCE_VALID_S, DecidedList, Word
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Geometry,
    TierRecord,
)
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, Publish, delete_all
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    StorageFullError,
)
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.tiers.documents import Documents
from tierfall.tiers.image_writer import Compression, PackedImageWriter, Packing, RawImageWriter
from tierfall.tiers.listing import TierCatalog
from tierfall.tiers.run_files import SetIdentityCheck

logger = logging.getLogger("tierfall")


class StoredTier(TierCatalog):
    """One run's checkpoints on one tier. All methods block, and may be called from several threads."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        backend: Backend,
        packing: Packing | None = None,
        pace: RateLimiter | None = None,
        read_only: str = "",
        last_answer_s: Callable[[], float] = lambda: -math.inf,
        set_identity_check: SetIdentityCheck | None = None,
        names: Callable[[str], Iterable[str]] = lambda folder: (),
        has_latest: bool = True,
        record: TierRecord | None = None,
    ) -> None:
        """With ``packing``, images are written packed; images of any codec are read.

        ``pace`` limits the rate of writes to ``backend``. ``read_only`` is the reason why ``backend`` was opened for
        reading only, '' where it was not. ``last_answer_s`` returns when the medium last answered, on the monotonic
        clock. For the rest see ``TierCatalog``.
        """
        super().__init__(
            Documents(name, run, backend),
            set_identity_check=set_identity_check,
            names=names,
            has_latest=has_latest,
            record=record,
        )
        self.read_only = read_only
        self.last_answer_s = last_answer_s
        self._packing = packing
        self._pace = pace
        self._bytes_per_s_max = None if pace is None else pace.bytes_per_second
        self._conditions = Conditions()

    @property
    def place(self) -> str:
        return self.backend.place

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Limit writes to so many bytes of raw image a second, and never above the configured rate; None: only the
        configured rate."""
        if self._pace is None:
            return
        if bytes_per_s is not None and self.compression is not None:
            bytes_per_s /= self.compression.ratio
        bounds = [bound for bound in (bytes_per_s, self._bytes_per_s_max) if bound is not None]
        self._pace.set_rate(min(bounds, default=None))

    def close(self) -> None:
        self.backend.close()

    # Files of a checkpoint -----------------------------------------------------------------------

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        key = self._key(checkpoint, keys.manifest_name(shard))
        with self._confirming_absence(key):
            return self._documents.read(key, bytes_known=length)

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        """Read the frame table of a packed image."""
        key = self._key(checkpoint, keys.stored_name(shard))
        with self._confirming_absence(key):
            return self._documents.read(key)

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        """Fill ``view`` from ``offset`` of the file of a shard's image, which ``codec`` has packed."""
        key = self._key(checkpoint, keys.shard_name(shard, codec))
        with self._confirming_absence(key):
            self.backend.read_into(key, offset, view)

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool:
        """Fill ``views`` with ``offset`` to ``end`` of that file if it is in the page cache; False, with nothing read,
        if it is not."""
        key = self._key(checkpoint, keys.shard_name(shard, codec))
        with self._confirming_absence(key):
            return self.backend.read_cached(key, offset, end, views)

    @property
    def cache_never_waits(self) -> bool:
        return self.backend.traits.cache_never_waits

    @property
    def is_packed(self) -> bool:
        return self._packing is not None

    @property
    def compression(self) -> Compression | None:
        """What was packed so far; None where images are stored raw."""
        return None if self._packing is None else self._packing.compression

    def create_shard(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        *,
        attempt_id: str | None = None,
        resumes: bool = False,
    ) -> ImageUpload:
        """Begin a shard's image. ``cut`` is its division into chunks, ``pieces`` its tensors in the manifest. Peer
        memory may have the image of that ``attempt_id`` already. ``resumes``: continue what another upload of these
        bytes has left, and leave what this one has sent if it is aborted."""
        packing, publish = self._packing, Publish.RESUME if resumes else Publish.REPLACE
        if packing is None:
            key = self._key(checkpoint, keys.shard_name(shard))
            writer = self.backend.create(key, length=cut.image_bytes, publish=publish)
            return RawImageWriter(writer)
        key = self._key(checkpoint, keys.shard_name(shard, packing.codec))
        record = self._key(checkpoint, keys.stored_name(shard))
        return PackedImageWriter(
            lambda bound: self.backend.create(key, length_max=bound, publish=publish),
            packing,
            shard=shard,
            cut=cut,
            pieces=pieces,
            part_bytes_min=self.backend.traits.part_bytes_min,
            write_record=lambda data: self._documents.replace(record, data),
        )

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None:
        self._documents.replace(self._key(checkpoint, keys.manifest_name(shard)), data)

    # Commit --------------------------------------------------------------------------------------

    def commit(self, commit: Commit, *, attempt: Attempt, repairs: bool = False) -> None:
        """Write a checkpoint's commit record, unless a newer attempt fences ``attempt``.

        A second call for the same checkpoint, after a lost reply or by the next start, succeeds. Raises FencedError,
        and IntegrityError where another checkpoint of that id is committed: it is never overwritten. A record of this
        one with the images of other ranks is replaced. ``repairs``: the existing copy is known to be this checkpoint,
        damaged. Its record is replaced, and its files in other codecs are deleted.
        """
        began_s = time.monotonic()
        self.fence.check(attempt)
        checkpoint, is_new = commit.lineage.checkpoint, True
        if repairs:
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._synced.add(checkpoint)
            self.delete_other_codecs(commit, attempt=attempt)
        else:
            is_new = self._create_commit(commit, attempt)
        try:
            if is_new:
                self.note_mended(commit)
        except BackendError as error:
            # The copy is committed all the same, and counts as damaged until it is read.
            text = "%s: that the copy of %s is whole again is not noted: %s"
            logger.warning(text, self.name, checkpoint, error)
        # A newer start may have deleted the folder in between, as unfinished.
        if time.monotonic() - began_s > FENCE_VALID_S:
            self.fence.check(attempt)
        try:
            self.record_lineage(commit, attempt)
        except BackendError as error:  # a deletion of this attempt's checkpoints records it first
            self._conditions.report(
                checkpoint.attempt, logging.WARNING,
                "%s: how attempt %d began is not recorded yet: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip

    def _create_commit(self, commit: Commit, attempt: Attempt) -> bool:
        """Create a commit record; return False if the same one was there."""
        checkpoint = commit.lineage.checkpoint
        try:
            self._documents.create(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
        except KeyExistsError:
            found = self.read_commit(checkpoint)
            is_same = found.lineage == commit.lineage and found.files == commit.files
            if is_same and self.backend.traits.durable:
                self.sync_commit(checkpoint)
                return False
            if not (is_same or (shards_of(commit) and same_checkpoint(found, commit))):
                raise IntegrityError(
                    f"commit on {self.name}: {checkpoint} was committed before with other content; "
                    "it is left as it is"
                ) from None
            # An earlier start's: with images of other ranks, or packed otherwise.
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._synced.add(checkpoint)
            if not is_same:
                self.delete_other_codecs(commit, attempt=attempt)
            return not is_same
        self._synced.add(checkpoint)
        return True

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None:
        """Record how the attempt of a committed checkpoint began; see ``LineageRecords.create``."""
        self._lineage.create(commit, writer)
        number = commit.lineage.checkpoint.attempt
        self._conditions.end(number, "%s: how attempt %d began is recorded", self.name, number)

    def write_latest(self, checkpoint: CheckpointId) -> None:
        """Write ``latest``, which names the newest checkpoint."""
        self.latest.write(checkpoint)

    def note_damaged(self, commit: Commit, why: str) -> None:
        """Note that the copy here is damaged, for later listings of any process, unless that is known. The list is
        read first."""
        line = commit.lineage
        if not self.decided.read().is_damaged(line.checkpoint, line.attempt_id):
            self._decide(Word.DAMAGED, commit, why)

    def note_mended(self, commit: Commit) -> None:
        """Note that the copy here is whole: it was written anew, or read whole. Nothing is written if no listing, and
        no reader of this process, has found it damaged."""
        line = commit.lineage
        if self.decided.known.is_damaged(line.checkpoint, line.attempt_id):
            self._decide(Word.MENDED, commit, "it was written again, or read whole")

    def _decide(self, word: Word, commit: Commit, reason: str) -> None:
        line = commit.lineage
        entry = self.decided.known.next(word, line.checkpoint, line.attempt_id)
        self.decided.add(entry, reason=reason)

    # The fence -----------------------------------------------------------------------------------

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """Raise FencedError if ``attempt`` must not delete or decide anything here; see ``Fence.check_newest``."""
        self.fence.check_newest(attempt, doing=doing)

    def check_begin(self, attempt: Attempt) -> None:
        """Raise FencedError if ``attempt`` must not begin a copy here; see ``Fence.check_begin``."""
        self.fence.check_begin(attempt)

    # Deletion ------------------------------------------------------------------------------------

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        batch: int = 0,
        next_latest: CheckpointId | None = None,
    ) -> DecidedList | None:
        """Delete a checkpoint, the commit record first.

        ``known`` are the entries that the decision took into account. If the list of this tier has any other, nothing
        is deleted, and the list is returned: the caller decides again. The list is read at the beginning of a ``batch``
        of deletions (0: a batch of its own), and if it was read more than FENCE_VALID_S ago. Without ``known``, the
        checkpoint is deleted whatever is decided, because its commit was revoked.

        ``attempt`` is that of the process that asks, None for a person's command. Raises FencedError, and deletes
        nothing from then on, where a newer attempt exists: the fence is checked before each request that deletes.

        If ``latest`` names the checkpoint, it is rewritten to ``next_latest`` where that is committed, else deleted, as
        on a full tier. The checkpoint ceases to exist with the first deletion; a kill after that leaves an unfinished
        folder, which the next start collects. Files that tierfall did not write are kept.
        """
        if known is not None:
            decided = self.decided.read(max_age_s=FENCE_VALID_S if batch else 0.0, batch=batch)
            if (decided - known).of_all_tiers:
                return decided
        doing = f"drop of {checkpoint}"
        if self.latest.read() == checkpoint:
            has_next = next_latest is not None and self.is_committed(next_latest)
            self.check_newest(attempt, doing=doing)
            if next_latest is None or not has_next:
                self.latest.delete()
            else:
                self.latest.write_or_delete(next_latest)
        if known is not None:
            self._record_lineage_of(checkpoint)
        self.check_newest(attempt, doing=doing)
        if known is not None:  # the requests until here may have taken long
            decided = self.decided.read(max_age_s=FENCE_VALID_S)
            if (decided - known).of_all_tiers:
                return decided
        self._synced.discard(checkpoint)
        self._cache.pop(checkpoint, None)
        self.backend.delete(keys.step_prefix(self._run, checkpoint) + keys.COMMIT_NAME)
        self.discard(checkpoint, attempt=attempt)
        return None

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Delete an uncommitted step folder, or one shard's files in it. The files of active writers are kept then, as
        other ranks may be writing there. ``attempt`` and FencedError are as in ``delete``."""

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of what is left of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        found = [f.key for f in self.files(checkpoint) if keys.is_tierfall_name(f.key)]
        selected = [name for name in found if shard is None or keys.parse_shard(name) == shard]
        delete_all(self.backend, [prefix + name for name in selected], before=check)
        if shard is None:
            check()
            self.backend.discard_unfinished(prefix)

    def delete_other_codecs(self, commit: Commit, *, attempt: Attempt) -> None:
        """Delete the files of images that were stored with another codec before. Raises FencedError."""
        checkpoint = commit.lineage.checkpoint

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of older files of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        kept = {file.name for file in commit.files}
        shards = {keys.parse_shard(name) for name in kept} - {None}
        names = [file.key for file in self.files(checkpoint)]
        others = [n for n in names if n not in kept and keys.parse_shard(n) in shards]
        delete_all(self.backend, [prefix + name for name in others], before=check)

    def delete_run(self) -> None:
        """Delete all that tierfall has written of the run, for a person's command; what names a checkpoint goes first,
        the tier's id last."""
        prefix = f"{self._run}/"
        found = [stored.key.removeprefix(prefix) for stored in self.backend.scan(prefix)]
        own = sorted(filter(keys.is_run_file, found), key=_order_of_deletion)
        for _, names in groupby(own, _order_of_deletion):
            delete_all(self.backend, [prefix + name for name in names])
        if own:
            self.backend.discard_unfinished(prefix)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Delete what writers of earlier starts left unpublished; return how many. Raises FencedError where ``attempt``
        is not the newest: a newer one has active writers."""
        self.check_newest(attempt, doing="deletion of unfinished files")
        return self.backend.discard_unfinished(f"{self._run}/")

    def _record_lineage_of(self, checkpoint: CheckpointId) -> None:
        """Record how the attempt of a checkpoint began; the checkpoint may be its last."""
        if self._lineage.has(checkpoint.attempt):
            return
        try:
            commit = self._read_present(checkpoint)
        except (KeyNotFoundError, IntegrityError, NotSupportedError):
            return  # an unreadable commit record does not say how the attempt began
        try:
            self._lineage.create(commit)
        except StorageFullError as error:  # the deletion frees space
            logger.warning(
                "%s: how attempt %d began is not recorded: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip


def _order_of_deletion(name: str) -> int:
    """Return when a file is deleted: first the files that name a checkpoint, then commit records, then the rest, last
    the tier record. After a kill, no file names a checkpoint that is gone, and no commit record lacks its files."""
    folder, _, leaf = name.rpartition("/")
    if name == keys.LATEST_NAME or folder == keys.LINEAGE_FOLDER:
        return 0
    return 1 if leaf == keys.COMMIT_NAME else 3 if name == keys.TIER_NAME else 2
