"""Repairing: damaged files are rewritten from good copies of the same checkpoint on other tiers.

A copy is rewritten in place: each file is complete and verified before it replaces the damaged one, the commit record
is the last. Nothing is removed before that, and marks are not touched: a good copy or a pin exists at every moment.
Files of another checkpoint of that id, or of a newer tierfall, are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from tierfall.core.copies.verify import CheckedCopy, CopyVerifier, Damage
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.commit_files import plain, same_checkpoint
from tierfall.core.format.records import Commit, parse_manifest
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    StepError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.findings import NEWER
from tierfall.ops.reader import RunReader
from tierfall.ops.write_copy import (
    discard_unfinished,
    mark_of,
    open_source,
    open_writable,
    replace_document,
    write_files,
    writing_attempt,
)
from tierfall.setup.tiers import lane_limits
from tierfall.tiers.stored import StoredTier

_MARKS = f"{keys.MARKS_FOLDER}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """The outcome of one repair; ``why`` is the source that it was rewritten from, or the error.

    ``id`` is None for a file of a tier as a whole, named by ``file``.
    """

    tier: str
    id: CheckpointId | None
    file: str
    done: bool
    why: str


class Repairer:
    """Repairs what a verification found; the caller holds the run's lock."""

    def __init__(
        self,
        reader: RunReader,
        listings: Sequence[Listing],
    ) -> None:
        self._reader = reader
        self._listings = listings
        self._known = {c.id: c for c in merge(listings)}
        self.repairs: list[RepairResult] = []

    # Copies ------------------------------------------------------------------------------------------

    def repair_copies(
        self, copies: Sequence[CheckedCopy], verifier: CopyVerifier
    ) -> Sequence[CheckedCopy]:
        """Rewrite what is damaged, and return the state of every copy: those that were changed are verified again."""
        return [self._try_repair(copy, verifier) if copy.damage else copy for copy in copies]

    def _try_repair(self, copy: CheckedCopy, verifier: CopyVerifier) -> CheckedCopy:
        newer = [damage.file for damage in copy.damage if damage.newer]
        for file in newer:
            self._note(copy.tier, copy.id, file, NEWER, done=False)
        if any(not file.startswith(_MARKS) for file in newer) or len(newer) == len(copy.damage):
            return copy
        try:
            why = self._repair_copy(copy)
        except IntegrityError as error:
            self._note(copy.tier, copy.id, "", self._lost(str(error)), done=False)
            return copy
        except TierfallError as error:
            self._note(copy.tier, copy.id, "", str(error), done=False)
            return copy
        again = verifier.check_stored(self._reader.stores[copy.tier], copy.id)
        if again.gone or again.error or any(not damage.newer for damage in again.damage):
            self._note(copy.tier, copy.id, "", "rewritten, and damaged again", done=False)
        else:
            self._note(copy.tier, copy.id, "", why, done=True)
        return again

    def _lost(self, why: str) -> str:
        """Add to an error the tiers that could not be read, and may hold a good copy."""
        silent = ", ".join(x.tier for x in self._listings if x.error is not None)
        return f"{why}; {silent} could not be read and may hold a good copy" if silent else why

    def _repair_copy(self, copy: CheckedCopy) -> str:
        if copy.tier not in self._reader.stores:
            raise StepError("an image in memory is not repaired; the next start frees its region")
        checkpoint = self._known[copy.id]
        if checkpoint.tombstoned:
            raise StepError("it is marked for deletion")
        with open_writable(self._reader.config, copy.tier) as store:
            self._check_ours(store, copy, checkpoint)
            damaged = [d for d in copy.damage if not d.newer]
            marks = [d for d in damaged if d.file.startswith(_MARKS)]
            discard_unfinished(store, self._reader.run, copy.id)
            done = self._repair_marks(store, checkpoint, marks)
            if len(marks) < len(damaged):
                done = [self._repair_files(store, checkpoint, copy), *done]
        return ", ".join(done)

    def _check_ours(
        self, store: StoredTier, copy: CheckedCopy, checkpoint: KnownCheckpoint
    ) -> None:
        """Raise StepError where the copy is of another checkpoint, NotSupportedError where a newer version wrote it."""
        commit, known = copy.commit, checkpoint.commit
        if commit is not None:
            if known is not None and not same_checkpoint(commit, known):
                raise StepError("it is another checkpoint than that on other tiers")
            return
        try:
            store.read_commit(copy.id)
        except TierfallError as error:
            if not error.is_damage:
                raise
            self._check_line(store, copy.id, known)

    def _check_line(self, store: StoredTier, id: CheckpointId, known: Commit | None) -> None:
        """Compare the lineage of each manifest that can be read, where the commit record cannot."""
        for rank in range(known.world_size if known else 0):
            shard = Shard(rank, known.world_size if known else 1)
            try:
                data = store.read_manifest(id, shard)
                manifest = parse_manifest(data, what=keys.manifest_name(shard))
            except TierfallError as error:
                if not error.is_damage:
                    raise
                continue
            if known is not None and manifest.lineage != known.lineage:
                raise StepError("its files are of another checkpoint than that on other tiers")

    def _repair_marks(
        self, store: StoredTier, checkpoint: KnownCheckpoint, damaged: Sequence[Damage]
    ) -> list[str]:
        for damage in damaged:
            name = damage.file.removeprefix(_MARKS)
            data = mark_of(self._reader, checkpoint, name).encode()
            replace_document(store, self._reader.run, checkpoint.id, damage.file, data)
        return [f"{damage.file} rewritten" for damage in damaged]

    def _repair_files(
        self, store: StoredTier, checkpoint: KnownCheckpoint, copy: CheckedCopy
    ) -> str:
        tiers = self._sources(store, checkpoint, copy)
        source = open_source(checkpoint, tiers, self._reader.opener())
        attempt = writing_attempt(
            self._reader, self._listings, source.commit.lineage, tier=store.name
        )
        store.check_fence(attempt)
        limits = lane_limits(store, self._reader.config)
        commit = write_files(store, limits, source, lambda count: None)
        store.check_fence(attempt)
        # what this tier was owed then is only in its own record
        if copy.commit is not None:
            commit = replace(commit, owed=copy.commit.owed)
        self._replace_record(store, commit)
        store.clear_damage(commit.lineage.checkpoint)
        store.delete_other_codecs(commit, attempt=attempt)
        return f"rewritten from {', '.join(source.tally.bytes)}"

    def _replace_record(self, store: StoredTier, commit: Commit) -> None:
        """Replace the commit record."""
        id, run = commit.lineage.checkpoint, self._reader.run
        if not store.is_committed(id):  # the checkpoint was deleted meanwhile
            self._delete_too(store, id)
        replace_document(store, run, id, keys.COMMIT_NAME, commit.encode())
        if not self._is_whole(store, commit):  # or is being deleted now
            self._delete_too(store, id)

    def _is_whole(self, store: StoredTier, commit: Commit) -> bool:
        """Whether every file of a commit record exists."""
        there = {stored.key for stored in store.files(commit.lineage.checkpoint, commit)}
        return all(file.name in there for file in commit.files)

    def _delete_too(self, store: StoredTier, id: CheckpointId) -> NoReturn:
        """Delete what was written of a checkpoint that was deleted meanwhile, the commit record first; raises
        StepError."""
        store.backend.delete(keys.step_prefix(self._reader.run, id) + keys.COMMIT_NAME)
        store.discard(id, attempt=None)
        raise StepError("it was deleted while it was repaired")

    def _sources(
        self, store: StoredTier, checkpoint: KnownCheckpoint, copy: CheckedCopy
    ) -> list[str]:
        """Return the tiers to read from: the others, and last the damaged copy: two may be damaged in different places.

        A packed copy is no source of itself: its image and record cannot be replaced in one step.
        """
        held = [x.tier for x in self._listings if x.tier in checkpoint.copies]
        others = [tier for tier in held if tier != copy.tier]
        commit = copy.commit
        raw = commit is not None and plain(commit).files == commit.files
        return [*others, copy.tier] if raw and not store.is_packed else others

    # Tiers as a whole --------------------------------------------------------------------------------

    def repair_tier(self, store: StoredTier, listing: Listing) -> None:
        """Rewrite damaged records of attempts from other tiers, and ``latest`` where it names a missing checkpoint."""
        for number in listing.attempts:
            file = keys.attempt_key("", number).lstrip("/")
            try:
                store.read_attempt(number)
            except IntegrityError:
                self._try(store.name, file, partial(self._repair_attempt, store.name, number))
            except (BackendError, NotSupportedError):
                continue  # reported by the check that follows
        try:
            stale = (latest := store.read_latest()) is not None and store.find_copy(latest) is None
        except BackendError:
            return  # likewise
        if stale:
            self._try(store.name, keys.LATEST_NAME, partial(self._repair_latest, store.name))

    def _try(self, tier: str, file: str, mend: Callable[[], str]) -> None:
        try:
            self._note(tier, None, file, mend(), done=True)
        except TierfallError as error:
            self._note(tier, None, file, str(error), done=False)

    def _repair_attempt(self, tier: str, number: int) -> str:
        for listing in self._listings:
            if listing.tier == tier or number not in listing.attempts:
                continue
            try:
                attempt = self._reader.stores[listing.tier].read_attempt(number)
            except TierfallError:
                continue
            key = keys.attempt_key(self._reader.run, number)
            data = attempt.encode()
            with (
                open_writable(self._reader.config, tier) as store,
                store.backend.create(key, length=len(data)) as writer,
            ):
                writer.write(0, memoryview(data))
                writer.publish()
            return f"rewritten from {listing.tier}"
        raise IntegrityError("no other tier has a good one")

    def _repair_latest(self, tier: str) -> str:
        there = [c for c in self._known.values() if tier in c.copies and not c.abandoned]
        with open_writable(self._reader.config, tier) as store:
            held = [c.id for c in there if store.is_committed(c.id)]
            if not held:
                store.delete_latest()
                return "removed, since the tier holds no checkpoint"
            store.write_latest(max(held))
        return f"names {max(held)}"

    def _note(self, tier: str, id: CheckpointId | None, file: str, why: str, *, done: bool) -> None:
        self.repairs.append(RepairResult(tier=tier, id=id, file=file, done=done, why=why))
