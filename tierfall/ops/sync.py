"""Copying and repairing: one checkpoint is written to one stored tier, from good copies on the tiers that have it.

``copy`` writes to a tier that does not hold it, as a flush does: packed as the tier packs, committed last, behind the
fence, with what the lists of other tiers have about it. No rule decides about it; a note is given if retention will
delete it.

``Repairer`` rewrites damaged files in place: each file is complete and verified before it replaces the damaged one, the
commit record is the last. Nothing is removed before that: a good copy exists at every moment. Files of another
checkpoint of that id, or of a newer tierfall, are never changed.

The run's lock is held, so that no trainer of this machine runs. What is written is on behalf of the newest attempt that
any tier knows: a newer one elsewhere fences it, as it fences a flush. No attempt is taken, so nobody is fenced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tierfall.config import Config
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally
from tierfall.core.copies.image_writes import begun_image, publish_image
from tierfall.core.copies.shard_reader import CheckpointReader
from tierfall.core.copies.verify import CheckedCopy, CopyVerifier
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in, merge
from tierfall.core.format.commit_files import plain, same_checkpoint
from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Lineage,
    Manifest,
    geometry,
    parse_manifest,
)
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.core.types import keys
from tierfall.core.types.backend import put_object
from tierfall.core.types.errors import (
    BackendError,
    ConfigError,
    IntegrityError,
    NotSupportedError,
    StepError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.core.types.view import Verdict
from tierfall.ops.commands import (
    Progress,
    Watch,
    check_room,
    owned_folder,
    trained_elsewhere,
    view_of,
)
from tierfall.ops.reader import RunReader
from tierfall.policies.retention import plan_retention
from tierfall.setup.attempts import attempt_of, newest_attempt
from tierfall.setup.tiers import ANSWER_S, close_stores, lane_limits, open_stores
from tierfall.tiers.stored import StoredTier

T = TypeVar("T")
logger = logging.getLogger("tierfall")
NEWER = "a newer tierfall wrote it: verify it with that version; this one does not change it"


@contextmanager
def owned_reader(config: Config, command: str) -> Iterator[RunReader]:
    """Hold the run's lock, with its tiers open for reading. Raises LockError where a trainer of this machine is
    alive."""
    with owned_folder(config, command), RunReader(config) as reader:
        yield reader


@contextmanager
def open_writable(config: Config, tier: str) -> Iterator[StoredTier]:
    """Open one stored tier for writing, each call with a bound.

    Raises UnreachableError, before anything is created, where its folder is missing, and where it does not answer;
    ConfigError where it is read-only.
    """
    only = config.model_copy(update={"tiers": [t for t in config.tiers if t.name == tier]})
    if not only.written:
        raise ConfigError(f"tier {tier} is read_only: nothing is changed there")
    stores, errors = open_stores(only, config.run, is_bounded=True, creates=False)
    if tier in errors:
        raise errors[tier]
    try:
        yield stores[tier]
    finally:
        close_stores(stores, ANSWER_S)


def _writing_attempt(
    reader: RunReader, listings: Sequence[Listing], line: Lineage, store: StoredTier
) -> Attempt:
    """Return the attempt to write on behalf of: the newest that any tier knows, else the one that saved the checkpoint;
    unless a newer one fences it on the tier.

    The record on that tier is read first. Raises the error of reading it where no tier's record can be read.
    """
    its_own_first = sorted(listings, key=lambda listing: listing.tier != store.name)
    newest = newest_attempt(its_own_first, reader.stores)
    attempt = attempt_of(line) if newest is None else newest[0]
    store.fence.check(attempt)
    return attempt


def _open_source(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], reader: RunReader
) -> tuple[Commit, CheckpointReader]:
    """Return the plain commit record of a checkpoint, and the images of all ranks on ``tiers``, fastest first.

    Raises IntegrityError where no tier has a good commit record, and as ``find_images`` does.
    """
    records = [plain(c) for t in tiers if (c := checkpoint.copies[t].commit) is not None]
    if not records:
        raise IntegrityError(f"no other tier holds a good commit record of {checkpoint.id}")
    commit = _united(records)
    images = CheckpointReader(checkpoint, tiers, reader.opener(), ReadTally(), None, None)
    images.manifests(range(commit.world_size), commit.world_size)  # before anything is written
    return commit, images


def _united(records: Sequence[Commit]) -> Commit:
    """Return a record with the files of all ranks: one that has them, or all records merged. The record in a rank's
    memory, or on a node's own disk, names only the files of that rank or node."""
    most = max(records, key=lambda record: len(record.files))
    if len(most.files) >= 2 * most.world_size:  # an image and a manifest each
        return most
    files = {file.name: file for record in records for file in record.files}
    return replace(most, files=tuple(files[name] for name in sorted(files)))


def write_files(
    store: StoredTier,
    limits: LaneLimits,
    commit: Commit,
    images: CheckpointReader,
    on_bytes: Callable[[int], None],
) -> Commit:
    """Write images and records of all ranks, each complete before it is visible; return the commit record that names
    them.

    A file of the same name is replaced once the whole image was read and verified. Raises the error of the source or of
    the tier.
    """
    id, world_size = commit.lineage.checkpoint, commit.world_size
    # What a killed process left there.
    store.backend.discard_unfinished(keys.step_prefix(commit.lineage.run, id))
    for shard in [Shard(rank, world_size) for rank in range(world_size)]:
        found, manifest = images.find(shard)
        with begun_image(store, id, shard, geometry(manifest), manifest.pieces) as writer:
            # The frames of a packed image are written in order.
            in_order = replace(limits, parallel=1) if store.is_packed else limits
            reader = ChunkReader(found, manifest, images.tally)
            _write_chunks(manifest, reader, in_order, writer.write_chunks, on_bytes)
            commit = publish_image(store, writer, manifest, commit, id=id, shard=shard)
    return commit


def _write_chunks(
    manifest: Manifest,
    reader: ChunkReader,
    limits: LaneLimits,
    put: Callable[[int, int, memoryview], None],
    on_bytes: Callable[[int], None],
) -> None:
    """Copy ranges of chunks, each as long as a part of the tier's objects."""
    runs = [range(*run) for run in limits.runs(geometry(manifest))]
    starts = [manifest.chunk_range(run[0])[0] for run in runs]
    sizes = [manifest.chunk_range(run[-1])[1] - at for run, at in zip(runs, starts, strict=True)]
    threads = max(1, min(limits.parallel, limits.budget_bytes // max(sizes)))
    pool = BufferPool(bytes=frame_bytes_max(max(sizes)), count=threads)

    def copy_range(number: int) -> None:
        run, start = runs[number], starts[number]
        with pool.lend_view(sizes[number]) as buffer:
            read = [reader.read(i, buffer[manifest.chunk_range(i)[0] - start :]) for i in run]
            is_in_place = all(view.obj is buffer.obj for view in read)  # else a read was given up
            put(
                run[0],
                start,
                buffer[: sizes[number]] if is_in_place else memoryview(b"".join(read)),
            )
        on_bytes(sizes[number])

    run_in_threads(threads, copy_range, range(len(runs)))


# Copying ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """The outcome of a copy. ``already``: the tier held a good one. ``sources`` are the bytes read, by tier.
    ``decided`` names what was added to the tier's list, as the lists of other tiers have it."""

    id: CheckpointId
    tier: str
    already: bool = False
    bytes: int
    sources: Mapping[str, int] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def copy(
    config: Config, id: CheckpointId, tier: str, watch: Watch = lambda done, total: None
) -> CopyResult:
    """Copy a checkpoint to a stored tier; ``watch`` is called with the bytes of images done and in total.

    Raises LockError where a trainer of this machine is alive, FencedError where a newer attempt starts meanwhile,
    StepError where the checkpoint is marked for deletion, or the tier holds another one of that id, IntegrityError
    where no copy is good, or that on the tier is damaged, CapacityError and BackendError where the tier cannot store
    it. After an error nothing of the copy is left.
    """
    with owned_reader(config, "tierfall copy") as reader:
        listings = reader.list()
        checkpoint = next((c for c in merge(listings) if c.id == id), None)
        if checkpoint is None:
            raise StepError(f"copy: {id} was deleted just now")
        if checkpoint.deleted:
            raise StepError(f"copy: {id} is marked for deletion; nothing was copied")
        there = next(x for x in listings if x.tier == tier)
        if there.error is not None:
            raise there.error
        _check_alone(reader, listings, checkpoint, tier)
        counter = Progress(watch, checkpoint.commit.image_bytes if checkpoint.commit else 0)
        decided = decided_in(listings).of(id, checkpoint.attempt_id)
        with open_writable(config, tier) as store:
            added = _add_decided(store, decided)
            if tier in checkpoint.copies:
                return replace(_already(store, checkpoint, counter), decided=added)
            return replace(_copy(reader, listings, store, checkpoint, counter), decided=added)


def _add_decided(store: StoredTier, decided: Iterable[Decided]) -> tuple[str, ...]:
    """Add what a tier's list lacks; return the words, and tags, that were added."""
    missing = DecidedList(decided) - store.decided.read()
    for entry in missing:
        store.decided.add(entry, reason="copied from the list of another tier")
    return tuple(f"{entry.word} {entry.tag}".rstrip() for entry in missing)


def _check_alone(
    reader: RunReader, listings: tuple[Listing, ...], checkpoint: KnownCheckpoint, tier: str
) -> None:
    """Raise StepError where the trainer of another node, if it is alive, may be writing the same copy now."""
    elsewhere = trained_elsewhere(listings, reader.stores)
    view = view_of(reader.config, merge(listings))
    owed = next(c.owed for c in view.checkpoints if c.id == checkpoint.id)
    if elsewhere is not None and tier in owed:
        raise StepError(
            f"copy: {tier} is owed {checkpoint.id}, and the trainer on {elsewhere.node}, where attempt "
            f"{elsewhere.number} was started, may be flushing it: run this on {elsewhere.node}; nothing was copied"
        )


def _already(store: StoredTier, checkpoint: KnownCheckpoint, counter: Progress) -> CopyResult:
    """Verify the copy that the tier holds."""
    id, tier, known = checkpoint.id, store.name, checkpoint.commit
    found = checkpoint.copies[tier]
    with CopyVerifier(counter.add) as verifier:
        checked = verifier.check_stored(store, id)
    if checked.error is not None:
        raise checked.error
    if any(damage.newer for damage in checked.damage):
        raise NotSupportedError(f"copy: {tier} holds {id} already: {NEWER}")
    repair = f"tierfall verify {id} --tier {tier} --repair"
    if checked.damage or checked.commit is None:
        raise IntegrityError(f"copy: {tier} holds {id} already, damaged; to repair it: {repair}")
    if found.damage is not None or known is None or not same_checkpoint(known, checked.commit):
        raise StepError(
            f"copy: {tier} holds another checkpoint of the id {id} already, which is not changed: find out what wrote "
            "it, and move its folder away"
        )
    store.sync_commit(id)
    return CopyResult(id=id, tier=tier, already=True, bytes=checked.bytes)


def _copy(
    reader: RunReader,
    listings: tuple[Listing, ...],
    store: StoredTier,
    checkpoint: KnownCheckpoint,
    counter: Progress,
) -> CopyResult:
    id, tier, config = checkpoint.id, store.name, reader.config
    held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
    commit, images = _open_source(checkpoint, held, reader)
    attempt = _writing_attempt(reader, listings, commit.lineage, store)
    there = next(listing for listing in listings if listing.tier == tier)
    check_room(config, there, commit.stored_bytes, doing="copy to")
    try:
        commit = write_files(store, lane_limits(store, config), commit, images, counter.add)
        store.delete_other_codecs(commit, attempt=attempt)  # of an unfinished copy
        store.commit(commit, attempt=attempt)
    except BaseException:
        _retract(store, id, attempt)
        raise
    after = tuple(store.list() if listing is there else listing for listing in listings)
    return CopyResult(
        id=id,
        tier=tier,
        bytes=commit.stored_bytes,
        sources=dict(images.tally.bytes),
        notes=(
            *(f"skipped: {f.what}: {f.reason}" for f in images.tally.fallbacks),
            *_name_latest(store, checkpoint, listings),
            *_retention(config, tier, id, listings, after),
        ),
    )


def _retract(store: StoredTier, id: CheckpointId, attempt: Attempt) -> None:
    """Remove the files of a copy that could not be committed, unless a newer attempt may be writing there."""
    try:
        if not store.is_committed(id):
            store.discard(id, attempt=attempt)
    except TierfallError as error:
        logger.warning(
            "%s: files of the unfinished copy of %s are left for now: %s", store.name, id, error
        )


def _name_latest(
    store: StoredTier, checkpoint: KnownCheckpoint, listings: tuple[Listing, ...]
) -> tuple[str, ...]:
    """Write ``latest`` where the tier holds nothing newer of the live lineage; return a note where that failed."""
    newer = [c for c in merge(listings) if store.name in c.copies and c.id > checkpoint.id]
    if checkpoint.abandoned or any(not c.abandoned for c in newer):
        return ()
    try:
        store.write_latest(checkpoint.id)
    except BackendError as error:  # the checkpoint is committed all the same
        return (f"{store.name}: could not write 'latest': {error}",)
    return ()


def _retention(
    config: Config,
    tier: str,
    id: CheckpointId,
    before: tuple[Listing, ...],
    after: tuple[Listing, ...],
) -> Iterator[str]:
    """Give a note for each copy, this one or others, that the rules of the tier will now delete."""
    dropped = _drops(config, tier, before)
    for other, reason in _drops(config, tier, after).items():
        if other not in dropped:
            what = "delete it again" if other == id else f"delete {other}"
            yield (
                f"{'' if other == id else f'beside {id}, '}the rules of {tier} {what} after the next commit there, or "
                f"by prune: {reason}; to keep it: tierfall pin {other}"
            )


def _drops(config: Config, tier: str, listings: tuple[Listing, ...]) -> dict[CheckpointId, str]:
    """Return what retention deletes on a tier, each with its reason."""
    decisions = plan_retention(view_of(config, merge(listings)), tier)
    return {d.checkpoint: d.reason for d in decisions if d.verdict is Verdict.DROP}


# Repairing -------------------------------------------------------------------------------------------


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

    def __init__(self, reader: RunReader, listings: Sequence[Listing]) -> None:
        self._reader = reader
        self._listings = listings
        self._known = {c.id: c for c in merge(listings)}
        self.repairs: list[RepairResult] = []

    # Copies ------------------------------------------------------------------------------------------

    def repair(self, copy: CheckedCopy, verifier: CopyVerifier) -> CheckedCopy:
        """Rewrite a damaged copy, and return its state: one that was changed is verified again."""
        newer = [damage.file for damage in copy.damage if damage.newer]
        for file in newer:
            self._note(copy.tier, copy.id, file, NEWER, done=False)
        if newer:
            return copy
        try:
            why = self._repair_copy(copy)
        except TierfallError as error:
            silent = ", ".join(x.tier for x in self._listings if x.error is not None)
            more = f"; {silent} could not be read and may hold a good copy" if silent else ""
            why = f"{error}{more if isinstance(error, IntegrityError) else ''}"
            self._note(copy.tier, copy.id, "", why, done=False)
            return copy
        again = verifier.check_stored(self._reader.stores[copy.tier], copy.id)
        if again.gone or again.error or any(not damage.newer for damage in again.damage):
            self._note(copy.tier, copy.id, "", "rewritten, and damaged again", done=False)
        else:
            self._note(copy.tier, copy.id, "", why, done=True)
        return again

    def _repair_copy(self, copy: CheckedCopy) -> str:
        if copy.tier not in self._reader.stores:
            raise StepError("an image in memory is not repaired; the next start frees its region")
        checkpoint = self._known[copy.id]
        if checkpoint.deleted:
            raise StepError("it is marked for deletion")
        with open_writable(self._reader.config, copy.tier) as store:
            self._check_ours(store, copy, checkpoint)
            store.decided.read()
            return self._repair_files(store, checkpoint, copy)

    def _check_ours(
        self, store: StoredTier, copy: CheckedCopy, checkpoint: KnownCheckpoint
    ) -> None:
        """Raise StepError where the copy is of another checkpoint, NotSupportedError where a newer version wrote it.

        Where the commit record cannot be read, the lineage of each manifest that can be read is compared.
        """
        commit, known = copy.commit, checkpoint.commit
        if commit is not None:
            if known is not None and not same_checkpoint(commit, known):
                raise StepError("it is another checkpoint than that on other tiers")
            return
        _unless_damaged(partial(store.read_commit, copy.id))
        if known is None:
            return

        def line_of(shard: Shard) -> Lineage:
            data = store.read_manifest(copy.id, shard)
            return parse_manifest(data, what=keys.manifest_name(shard)).lineage

        for rank in range(known.world_size):
            line = _unless_damaged(partial(line_of, Shard(rank, known.world_size)))
            if line not in (None, known.lineage):
                raise StepError("its files are of another checkpoint than that on other tiers")

    def _repair_files(
        self, store: StoredTier, checkpoint: KnownCheckpoint, copy: CheckedCopy
    ) -> str:
        tiers = self._sources(store, checkpoint, copy)
        commit, images = _open_source(checkpoint, tiers, self._reader)
        attempt = _writing_attempt(self._reader, self._listings, commit.lineage, store)
        limits = lane_limits(store, self._reader.config)
        commit = write_files(store, limits, commit, images, lambda count: None)
        # what this tier was owed then is only in its own record
        if copy.commit is not None:
            commit = replace(commit, owed=copy.commit.owed)
        self._commit(store, commit, attempt)
        return f"rewritten from {', '.join(images.tally.bytes)}"

    def _commit(self, store: StoredTier, commit: Commit, attempt: Attempt) -> None:
        """Replace the commit record. What was written of a checkpoint that was deleted meanwhile is deleted too, its
        commit record first; raises StepError then."""
        id = commit.lineage.checkpoint
        store.fence.check(attempt)
        if store.is_committed(id):
            store.commit(commit, attempt=attempt, repairs=True)
            there = {stored.key for stored in store.files(id, commit)}
            if all(file.name in there for file in commit.files):
                return  # else it is being deleted now
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
                store.fence.read(number)
            except IntegrityError:
                self._try(store.name, file, partial(self._repair_attempt, store.name, number))
            except (BackendError, NotSupportedError):
                continue  # reported by the check that follows
        try:
            stale = (latest := store.latest.read()) is not None and store.find_copy(latest) is None
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
                attempt = self._reader.stores[listing.tier].fence.read(number)
            except TierfallError:
                continue
            key = keys.attempt_key(self._reader.run, number)
            with open_writable(self._reader.config, tier) as store:
                put_object(store.backend, key, attempt.encode())
            return f"rewritten from {listing.tier}"
        raise IntegrityError("no other tier has a good one")

    def _repair_latest(self, tier: str) -> str:
        there = [c for c in self._known.values() if tier in c.copies and not c.abandoned]
        with open_writable(self._reader.config, tier) as store:
            held = [c.id for c in there if store.is_committed(c.id)]
            if not held:
                store.latest.delete()
                return "removed, since the tier holds no checkpoint"
            store.write_latest(max(held))
        return f"names {max(held)}"

    def _note(self, tier: str, id: CheckpointId | None, file: str, why: str, *, done: bool) -> None:
        self.repairs.append(RepairResult(tier=tier, id=id, file=file, done=done, why=why))


def _unless_damaged(read: Callable[[], T]) -> T | None:
    """Return what is read, None where it is damaged."""
    try:
        return read()
    except TierfallError as error:
        if not error.is_damage:
            raise
        return None
