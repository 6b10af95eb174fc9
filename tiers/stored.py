"""A tier that keeps checkpoints in a backend: local NVMe, a parallel file system, an object store.

It owns the names and the order in which a checkpoint comes to exist: images, manifests, then the commit record. Its
parts are the documents, marks, attempts, catalog and deletions. It makes no decisions, and imports no backend.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tierfall.core.format.catalog import FoundCopy, Listing
from tierfall.core.format.commit_files import damage_mark, same_checkpoint, shards_of
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Attempt, Commit, Geometry, Mark, TierRecord
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, StoredObject
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.tiers.attempts import Fence, LineageRecords
from tierfall.tiers.deletion import TierDeletions
from tierfall.tiers.documents import Documents
from tierfall.tiers.image_writer import PackCounts, PackedImageWriter, Packing, RawImageWriter
from tierfall.tiers.listing import TierCatalog
from tierfall.tiers.marks import Marks
from tierfall.tiers.run_files import LatestHint, SetIdentityCheck, TierMarker

FENCE_VALID_S = 1.0
"""How long a commit may take before it checks the fence a second time."""
REQUESTS_AT_ONCE_MIN = 32
REQUESTS_FOR_EACH = 4
"""Concurrent small requests: this many for each large one that the backend's ``max_parallel`` allows, and at least
REQUESTS_AT_ONCE_MIN."""


class StoredTier:
    """One run's checkpoints on one tier. All methods block, and may be called from several threads."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        backend: Backend,
        packing: Packing | None = None,
        pace: RateLimiter | None = None,
        set_identity_check: SetIdentityCheck | None = None,
        names: Callable[[str], Iterable[str]] = lambda folder: (),
        has_latest: bool = True,
        record: TierRecord | None = None,
        read_only: str = "",
        last_answer_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """With ``packing``, images are written packed; images of any codec are read.

        ``pace`` limits the rate of writes to ``backend``. ``set_identity_check`` is the method of that name of a
        backend whose folder can be mounted anew. ``names`` returns the names in a folder, those that scans leave out
        included. ``has_latest``: the file ``latest`` is kept. ``record`` is the tier record, where it was read before.
        ``read_only`` is the reason why ``backend`` was opened for reading only, '' where it was not.
        ``last_answer_s`` returns when the medium last answered, on the monotonic clock.
        """
        self.name = name
        self.read_only = read_only
        self.last_answer_s = last_answer_s
        self.backend = backend
        self._run = run
        self._packing = packing
        self._pace = pace
        self._bytes_per_s_max = None if pace is None else pace.bytes_per_second
        parallel = max(REQUESTS_AT_ONCE_MIN, REQUESTS_FOR_EACH * backend.traits.max_parallel)
        documents = Documents(name, run, backend)
        self._documents = documents
        self._marks = Marks(documents, parallel=parallel)
        self._marker = TierMarker(documents, set_identity_check, record)
        self._latest = LatestHint(documents, kept=has_latest)
        self._conditions = Conditions()
        self._fence = Fence(documents, self._marker.recreate)
        self._lineage = LineageRecords(documents, self._fence)
        self._catalog = TierCatalog(
            documents,
            self._marks,
            self._lineage,
            self._latest,
            self._marker,
            names=names,
            parallel=parallel,
        )
        self._deletions = TierDeletions(
            documents, self._catalog, self._marks, self._fence, self._lineage, self._latest
        )

    @property
    def place(self) -> str:
        return self.backend.place

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Limit writes to so many bytes of raw image a second, and never above the configured rate; None: only the
        configured rate."""
        if self._pace is None:
            return
        packed = self.pack_counts
        if bytes_per_s is not None and packed is not None and packed.raw_bytes:
            bytes_per_s *= packed.packed_bytes / packed.raw_bytes
        bounds = [bound for bound in (bytes_per_s, self._bytes_per_s_max) if bound is not None]
        self._pace.set_rate(min(bounds, default=None))

    def close(self) -> None:
        self.backend.close()

    # Listing -------------------------------------------------------------------------------------

    def list(self) -> Listing:
        """List the run on this tier. Where the tier does not answer, the listing holds the error."""
        try:
            return self._catalog.list()
        except TierfallError as error:
            return Listing(tier=self.name, error=error)

    def find_copy(self, checkpoint: CheckpointId) -> FoundCopy | None:
        """Read one copy as ``list`` reads all; None where it has no commit record, and the tier's id can be read."""
        return self._catalog.find(checkpoint)

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is committed here: one request."""
        return self._catalog.is_committed(checkpoint)

    def files(
        self, checkpoint: CheckpointId, commit: Commit | None = None
    ) -> tuple[StoredObject, ...]:
        """List all files of a step folder, by their names in it. The store is asked by key for those that ``commit``
        names and the listing does not show."""
        return self._catalog.files(checkpoint, commit)

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        with self._confirming_absence(self._key(checkpoint, keys.COMMIT_NAME)):
            return self._catalog.read_commit(checkpoint)

    def sync_commit(self, checkpoint: CheckpointId) -> None:
        """Make an existing commit record durable; see ``TierCatalog.sync_commit``."""
        self._catalog.sync_commit(checkpoint)

    # Files of a checkpoint -----------------------------------------------------------------------

    def read_manifest(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        key = self._key(checkpoint, keys.manifest_name(shard))
        with self._confirming_absence(key):
            return self._documents.read(key)

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

    @contextmanager
    def _confirming_absence(self, key: str) -> Iterator[None]:
        """Let the answer that a file of a checkpoint is absent stand only if the tier's id can be read, and no listing
        shows the file."""
        try:
            yield
        except KeyNotFoundError as error:
            self._marker.confirm_absence(error, key)
            raise

    @property
    def cache_never_waits(self) -> bool:
        return self.backend.traits.cache_never_waits

    @property
    def is_packed(self) -> bool:
        return self._packing is not None

    @property
    def pack_counts(self) -> PackCounts | None:
        """What was packed so far; None where images are stored raw."""
        return None if self._packing is None else self._packing.counts

    def create_shard(
        self, checkpoint: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
    ) -> RawImageWriter | PackedImageWriter:
        """Begin a shard's image. ``cut`` is its division into chunks, ``pieces`` its tensors in the manifest."""
        packing = self._packing
        if packing is None:
            key = self._key(checkpoint, keys.shard_name(shard))
            return RawImageWriter(self.backend.create(key, length=cut.image_bytes))
        key = self._key(checkpoint, keys.shard_name(shard, packing.codec))
        record = self._key(checkpoint, keys.stored_name(shard))
        return PackedImageWriter(
            lambda bound: self.backend.create(key, length_max=bound),
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

    def commit(
        self,
        commit: Commit,
        *,
        attempt: Attempt,
        marks: Iterable[Mark] = (),
        repairs: bool = False,
    ) -> None:
        """Write a checkpoint's marks and then its commit record, unless a newer attempt fences ``attempt``.

        A second call for the same checkpoint, after a lost reply or by the next start, succeeds. Raises FencedError,
        and IntegrityError where another checkpoint of that id is committed: it is never overwritten. A record of this
        one with the images of other ranks is replaced. ``repairs``: the existing copy is known to be this checkpoint,
        damaged or on some nodes only. Its record is replaced, and its files in other codecs are deleted.
        """
        began_s = time.monotonic()
        self.check_fence(attempt)
        checkpoint = commit.lineage.checkpoint
        for mark in marks:
            self._marks.create(mark)
        if repairs:
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._catalog.note_synced(checkpoint)
            self.clear_damage(checkpoint)
            self.delete_other_codecs(commit, attempt=attempt)
        else:
            self._create_commit(commit, attempt)
        # A newer start may have deleted the folder in between, as unfinished.
        if time.monotonic() - began_s > FENCE_VALID_S:
            self.check_fence(attempt)
        try:
            self.record_lineage(commit, attempt)
        except BackendError as error:  # a deletion of this attempt's checkpoints records it first
            self._conditions.report(
                checkpoint.attempt, logging.WARNING,
                "%s: how attempt %d began is not recorded yet: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip

    def _create_commit(self, commit: Commit, attempt: Attempt) -> None:
        checkpoint = commit.lineage.checkpoint
        try:
            self._documents.create(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
        except KeyExistsError:
            found = self.read_commit(checkpoint)
            is_same = found.lineage == commit.lineage and found.files == commit.files
            if is_same and self.backend.traits.durable:
                self.sync_commit(checkpoint)
                return
            if not (is_same or (shards_of(commit) and same_checkpoint(found, commit))):
                raise IntegrityError(
                    f"commit on {self.name}: {checkpoint} was committed before with other content; "
                    "it is left as it is"
                ) from None
            # An earlier start's: with images of other ranks, packed otherwise, or in the memory of one node of several.
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._catalog.note_synced(checkpoint)
            if not is_same:
                self.delete_other_codecs(commit, attempt=attempt)
        else:
            self._catalog.note_synced(checkpoint)

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None:
        """Record how the attempt of a committed checkpoint began; see ``LineageRecords.create``."""
        self._lineage.create(commit, writer)
        number = commit.lineage.checkpoint.attempt
        self._conditions.end(number, "%s: how attempt %d began is recorded", self.name, number)

    def write_latest(self, checkpoint: CheckpointId) -> None:
        """Write ``latest``, which names the newest checkpoint."""
        self._latest.write(checkpoint)

    def read_latest(self) -> CheckpointId | None:
        return self._latest.read()

    def delete_latest(self) -> None:
        self._latest.delete()

    # Identity ------------------------------------------------------------------------------------

    @property
    def record(self) -> TierRecord | None:
        """The tier record that was read or written last."""
        return self._marker.last

    def read_tier(self) -> TierRecord | None:
        """Read the tier record; None where there is none yet."""
        return self._marker.read()

    def write_tier(self, record: TierRecord, *, again: bool = False) -> TierRecord:
        """Create the tier record, or return the one that exists; ``again`` replaces it."""
        return self._marker.write(record, again=again)

    def expect_identity(self, id: str) -> None:
        """Let the backend continue with a folder that is mounted anew if its tier record has this id."""
        self._marker.expect(id)

    # Attempts and the fence ----------------------------------------------------------------------

    def attempts(self) -> tuple[int, ...]:
        """List the numbers of all attempts with a record, ascending."""
        return self._fence.numbers()

    def read_attempt(self, number: int) -> Attempt:
        """Read an attempt's record. Raises IntegrityError where it is damaged, StrayAttemptError where it is another
        attempt's."""
        return self._fence.read(number)

    def create_attempt(self, attempt: Attempt) -> None:
        """Create the attempt's record; raises KeyExistsError where another process has the number."""
        self._fence.create(attempt)

    def trust_attempt(self, attempt: Attempt) -> None:
        """Allow the record of ``attempt`` to be rewritten if it is damaged; see ``Fence.trust``."""
        self._fence.trust(attempt)

    def check_fence(self, attempt: Attempt) -> None:
        """Raise FencedError if ``attempt`` must not commit here; see ``Fence.check``."""
        self._fence.check(attempt)

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """Raise FencedError if ``attempt`` must not delete here or change a mark; see ``Fence.check_newest``."""
        self._fence.check_newest(attempt, doing=doing)

    def check_begin(self, attempt: Attempt) -> None:
        """Raise FencedError if ``attempt`` must not begin a copy here; see ``Fence.check_begin``."""
        self._fence.check_begin(attempt)

    def check_publish(self, checkpoint: CheckpointId, shard: Shard, *, attempt: Attempt) -> None:
        """Raise FencedError as ``check_newest`` does, before ``attempt`` publishes a shard's files, if that would
        replace one: it may belong to a copy that a newer attempt has made with another codec.

        Where no file exists and the next attempt number is free, the attempts are not listed; the commit lists them.
        """
        codec = Codec.NONE if self._packing is None else self._packing.codec
        files = [keys.shard_name(shard, codec), keys.manifest_name(shard)]
        if self._packing is not None:
            files.append(keys.stored_name(shard))
        replaces = any(self._documents.exists(self._key(checkpoint, name)) for name in files)
        if replaces or self._fence.is_followed(attempt):
            self.check_newest(attempt, doing=f"flush of {checkpoint}")

    # Marks ---------------------------------------------------------------------------------------

    def add_mark(self, mark: Mark) -> None:
        """Write a person's mark beside a checkpoint; other processes that have the run open will read it."""
        self._marks.add(mark)

    def remove_mark(self, checkpoint: CheckpointId, name: str) -> None:
        """Delete a mark; other processes that have the run open will notice."""
        self._marks.remove(checkpoint, name)

    def read_mark(self, checkpoint: CheckpointId, name: str) -> Mark:
        return self._marks.read(checkpoint, name)

    def marks(self, checkpoint: CheckpointId) -> frozenset[str]:
        """Read the names of the persons' marks beside a checkpoint."""
        return self._marks.of(checkpoint)

    def read_marks(self, checkpoints: Iterable[CheckpointId]) -> dict[CheckpointId, frozenset[str]]:
        """Read the names of the persons' marks beside these checkpoints; beside all, if any mark of the run changed
        since the last call."""
        return self._marks.of_many(checkpoints)

    def mark_damaged(self, commit: Commit, why: str, *, wall_time_s: float) -> None:
        """Mark a copy as damaged, for later listings of any process.

        Raises KeyNotFoundError, and leaves no mark, where the copy has been deleted.
        """
        name = damage_mark(commit.lineage)
        id = commit.lineage.checkpoint
        self.add_mark(Mark(name=name, checkpoint=id, wall_time_s=wall_time_s, reason=why))
        try:
            self.read_commit(id)
        except KeyNotFoundError:
            self.remove_mark(id, name)
            raise

    def clear_damage(self, checkpoint: CheckpointId) -> None:
        """Delete the damage marks of a copy that was rewritten, or read whole and verified."""
        self._marks.forget_damage(checkpoint)

    # Deletion ------------------------------------------------------------------------------------

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        tombstoned: bool = False,
        next_latest: CheckpointId | None = None,
        ignore_marks: bool = False,
    ) -> frozenset[str]:
        """Delete a checkpoint, the commit record first, unless its marks forbid it (``prevents_deletion``); return
        them. ``ignore_marks``: delete it whatever its marks, because its commit was revoked.

        ``attempt`` is that of the process that asks, None for a person's command. Raises FencedError, and deletes
        nothing from then on, where a newer attempt exists: the fence is checked before each request that deletes.

        If ``latest`` names the checkpoint, it is rewritten to ``next_latest`` where that is committed, else deleted. On
        a full tier it is deleted first and rewritten at the end. The checkpoint ceases to exist with the first
        deletion; a kill after that leaves an unfinished folder, which the next start collects. Files that tierfall did
        not write are kept.
        """
        return self._deletions.drop(
            checkpoint,
            attempt=attempt,
            tombstoned=tombstoned,
            next_latest=next_latest,
            ignore_marks=ignore_marks,
        )

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Delete an uncommitted step folder, or one shard's files in it; see ``TierDeletions.discard``. ``attempt`` and
        FencedError are as in ``delete``."""
        self._deletions.discard(checkpoint, shard, attempt=attempt)

    def delete_other_codecs(self, commit: Commit, *, attempt: Attempt) -> None:
        """Delete the files of images that were stored with another codec before. Raises FencedError."""
        self._deletions.delete_other_codecs(commit, attempt=attempt)

    def delete_run(self) -> None:
        """Delete all that tierfall has written of the run, its id included; for a person's command."""
        self._deletions.delete_run()

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Delete what writers of earlier starts left unpublished; return how many. Raises FencedError where ``attempt``
        is not the newest: a newer one has active writers."""
        return self._deletions.discard_unfinished(attempt=attempt)

    def _key(self, checkpoint: CheckpointId, name: str) -> str:
        return keys.step_prefix(self._run, checkpoint) + name
