"""The engine of offline work: one checkpoint is written to one stored tier, from good copies on the tiers that have it.

``send`` writes images, ``commit_copy`` the record. ``copy``, ``Repairer`` and ``drain`` (``ops/drain.py``) are calls of
these. ``copy`` writes to a tier that does not hold the checkpoint, as a flush does. ``Repairer`` rewrites damaged files
in place: each is complete and verified before it replaces the damaged one, so that a good copy exists at every moment.

The run's lock is held, so that no trainer of this machine runs. What is written is on behalf of the newest attempt that
any tier knows: a newer one elsewhere fences it, as it fences a flush. No attempt is taken, so nobody is fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tierfall.config import Config
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.copies.checkpoint_reader import CheckpointReader, OpenImage
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally
from tierfall.core.copies.image_writes import ImageUpload, aborted_on_failure, publish_image
from tierfall.core.copies.verify import CheckedCopy, CopyVerifier
from tierfall.core.flush.lane import LaneLimits
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in, merge
from tierfall.core.format.commit_files import (
    files_of,
    packed_files,
    plain,
    raw_files,
    same_checkpoint,
    unite_records,
)
from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Lineage,
    Manifest,
    NamedFile,
    parse_manifest,
)
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.runtime.threads import run_in_threads
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
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.core.types.view import Verdict
from tierfall.ops.commands import (
    check_room,
    owned_folder,
    trained_elsewhere,
    view_of,
)
from tierfall.ops.reader import RunReader
from tierfall.policies.retention import plan_retention
from tierfall.setup.start import attempt_of, newest_attempt
from tierfall.setup.tiers import ANSWER_S, close_stores, lane_limits, open_stores
from tierfall.telemetry.progress import Progress, Watch
from tierfall.tiers.stored import StoredTier

T = TypeVar("T")
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
    stores, errors = open_stores(only, offline=True)
    if tier in errors:
        raise errors[tier]
    try:
        yield stores[tier]
    finally:
        close_stores(stores, ANSWER_S)


def writing_attempt(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint and its good copies. ``commit`` is its record, with the raw files of all ranks that any copy has. It
    is the evidence for each record that is written of it."""

    commit: Commit
    images: CheckpointReader


def open_source(checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage) -> Source:
    """Open a checkpoint on ``tiers``, fastest first. Raises IntegrityError where no tier has a good commit record."""
    records = {t: plain(c) for t in tiers if (c := checkpoint.copies[t].commit) is not None}
    if not records:
        raise IntegrityError(f"no other tier holds a good commit record of {checkpoint.id}")
    images = CheckpointReader(checkpoint, tiers, open_image, ReadTally(), None, None)
    # The record in a rank's memory, or on a node's own disk, names only the files of that rank or node.
    return Source(commit=unite_records(records), images=images)


def send(
    source: Source,
    store: StoredTier,
    limits: LaneLimits,
    shards: Iterable[Shard],
    *,
    attempt: Attempt,
    on_bytes: Callable[[int], None],
    anew: bool = False,
) -> tuple[NamedFile, ...]:
    """Write the images of ``shards`` and their manifests, each complete before it is visible; return their files.

    An image that the tier holds already is not sent again: an earlier call, or another machine, has sent it. Of one
    that an earlier call had begun, however it ended, what has arrived is compared, and not sent again; if it is a raw
    image in a folder, it is not read from the source again either. So does this call leave what it has begun. With
    ``anew``, a file of the same name is replaced once the whole image was read and verified. Raises the error of the
    source or of the tier, and FencedError.
    """
    id = source.commit.lineage.checkpoint
    sizes = {} if anew else sizes_on(store, id)
    files: list[NamedFile] = []
    for shard in shards:
        found, manifest = source.images.find(shard.rank)
        if held := held_files(store, source.commit, shard, sizes, manifest):
            files += held
            on_bytes(manifest.image_bytes)
            continue
        cut = manifest.geometry()
        writer = store.create_shard(id, shard, cut, manifest.pieces, resumes=True)
        with aborted_on_failure(writer):
            # The frames of a packed image are written in order.
            in_order = replace(limits, parallel=1) if store.is_packed else limits
            reader = ChunkReader(found, manifest, source.images.tally)
            _write_chunks(manifest, reader, in_order, writer, on_bytes)
            store.check_newest(attempt, doing=f"flush of {id}")
            record = publish_image(store, writer, manifest, source.commit, id=id, shard=shard)
        files += files_of(record, shard)
    return tuple(files)


def sizes_on(store: StoredTier, id: CheckpointId) -> dict[str, int]:
    """Return the files of a checkpoint that a tier has, with their sizes in bytes."""
    return {stored.key: stored.bytes for stored in store.files(id)}


def held_files(
    store: StoredTier,
    commit: Commit,
    shard: Shard,
    sizes: Mapping[str, int],
    manifest: Manifest | None = None,
) -> tuple[NamedFile, ...] | None:
    """Return the files of a shard of the checkpoint of ``commit`` as they are on a tier, which has files of these
    ``sizes``; None where it has not all of them, or those of another image than that of ``manifest``."""
    id = commit.lineage.checkpoint
    if keys.manifest_name(shard) not in sizes:
        return None
    data = store.read_manifest(id, shard)
    there = _unless_damaged(partial(parse_manifest, data, what=f"{store.name}: manifest of {id}"))
    if there is None or there.lineage != commit.lineage or manifest not in (None, there):
        return None
    image, document = raw_files(shard, image_bytes=there.image_bytes, manifest=data)
    if sizes.get(image.name) == image.bytes:
        return image, document
    for codec in set(Codec) - {Codec.NONE}:
        size = sizes.get(keys.shard_name(shard, codec))
        if size is not None and keys.stored_name(shard) in sizes:
            record, raw_bytes = store.read_stored(id, shard), there.image_bytes
            packed = packed_files(
                shard, codec, stored_bytes=size, raw_bytes=raw_bytes, record=record
            )
            return (*packed, document)
    return None


def commit_copy(
    source: Commit,
    store: StoredTier,
    files: Iterable[NamedFile],
    *,
    attempt: Attempt,
    owed: tuple[CheckpointId, ...] = (),
    repairs: bool = False,
) -> Commit:
    """Write the commit record of a copy, whose images are there as ``files``; no other function writes one offline.
    ``owed`` are older checkpoints that the tier still lacks. ``repairs``: a damaged copy was rewritten in place.

    The evidence that it is a checkpoint is the record of the ``source``, never what is in the target. Raises
    FencedError, and StepError where the checkpoint was deleted meanwhile: what was written is deleted too then.
    """
    id, attempt_id = source.lineage.checkpoint, source.lineage.attempt_id
    commit = replace(source, files=tuple(files), owed=owed)
    store.fence.check(attempt)
    is_there = not repairs or store.is_committed(id)
    if is_there and not store.decided.read().is_deleted(id, attempt_id):
        store.delete_other_codecs(commit, attempt=attempt)  # of an unfinished copy
        store.commit(commit, attempt=attempt, repairs=repairs)
        there = {stored.key for stored in store.files(id, commit)} if repairs else None
        if there is None or all(file.name in there for file in commit.files):
            return commit  # else it is being deleted now
    store.backend.delete(keys.step_prefix(commit.lineage.run, id) + keys.COMMIT_NAME)
    store.discard(id, attempt=None)
    raise StepError(f"{id} was deleted while it was written to {store.name}")


def _write_chunks(
    manifest: Manifest,
    reader: ChunkReader,
    limits: LaneLimits,
    writer: ImageUpload,
    on_bytes: Callable[[int], None],
) -> None:
    """Copy ranges of chunks, each as long as a part of the tier's objects. A range that an earlier call has left there
    is not read from the source again if it matches its digests."""
    runs = [range(*run) for run in limits.runs(manifest)]
    starts = [manifest.chunk_range(run[0])[0] for run in runs]
    sizes = [manifest.chunk_range(run[-1])[1] - at for run, at in zip(runs, starts, strict=True)]
    threads = max(1, min(limits.parallel, limits.budget_bytes // max(sizes)))
    pool = BufferPool(bytes=frame_bytes_max(max(sizes)), count=threads)

    def is_left(run: range, start: int, view: memoryview) -> bool:
        if not writer.find_chunks(start, view):
            return False
        ranges = [manifest.chunk_range(i) for i in run]
        found = [chunk_digest(view[low - start : high - start]) for low, high in ranges]
        return found == [manifest.digests[i] for i in run]

    def copy_range(number: int) -> None:
        run, start = runs[number], starts[number]
        with pool.lend_view(sizes[number]) as buffer:
            view = buffer[: sizes[number]]
            if not is_left(run, start, view):
                read = [reader.read(i, buffer[manifest.chunk_range(i)[0] - start :]) for i in run]
                if not all(each.obj is buffer.obj for each in read):  # a read was given up
                    view = memoryview(b"".join(read))
            writer.write_chunks(run[0], start, view)
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
    it. What was sent before an error is there when the copy is repeated; else the next start deletes it.
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
        check_alone(reader, listings, checkpoint, tier)
        counter = Progress(watch, checkpoint.commit.image_bytes if checkpoint.commit else 0)
        decided = decided_in(listings).of(id, checkpoint.attempt_id)
        with open_writable(config, tier) as store:
            added = add_decided(store, decided)
            if tier in checkpoint.copies:
                return replace(_already(store, checkpoint, counter), decided=added)
            return replace(_copy(reader, listings, store, checkpoint, counter), decided=added)


def add_decided(store: StoredTier, decided: Iterable[Decided]) -> tuple[str, ...]:
    """Add what a tier's list lacks; return the words, and tags, that were added."""
    missing = DecidedList(decided) - store.decided.read()
    for entry in missing:
        store.decided.add(entry, reason="copied from the list of another tier")
    return tuple(f"{entry.word} {entry.tag}".rstrip() for entry in missing)


def check_alone(
    reader: RunReader,
    listings: tuple[Listing, ...],
    checkpoint: KnownCheckpoint,
    tier: str,
    *,
    doing: str = "copy",
    advice: str = "",
) -> None:
    """Raise StepError where the trainer of another node, if it is alive, may be writing the same copy now."""
    elsewhere = trained_elsewhere(listings, reader.stores)
    view = view_of(reader.config, merge(listings))
    owed = next(c.owed for c in view.checkpoints if c.id == checkpoint.id)
    if elsewhere is not None and tier in owed:
        raise StepError(
            f"{doing}: {tier} is owed {checkpoint.id}, and the trainer on {elsewhere.node}, where attempt "
            f"{elsewhere.number} was started, may be flushing it: run this on {elsewhere.node}{advice}; nothing was "
            "copied"
        )


def _already(store: StoredTier, checkpoint: KnownCheckpoint, counter: Progress) -> CopyResult:
    """Verify the copy that the tier holds."""
    id, tier, known = checkpoint.id, store.name, checkpoint.commit
    with CopyVerifier(counter.add) as verifier:
        checked = verifier.check_stored(store, id)
    if checked.error is not None:
        raise checked.error
    if any(damage.newer for damage in checked.damage):
        raise NotSupportedError(f"copy: {tier} holds {id} already: {NEWER}")
    others_are_good = any(not c.damage for t, c in checkpoint.copies.items() if t != tier)
    verify = f"tierfall verify {id}" + (f" --tier {tier} --repair" if others_are_good else "")
    if checked.damage or checked.commit is None:
        raise IntegrityError(f"copy: {tier} holds {id} already, damaged; what helps: {verify}")
    if (
        checkpoint.copies[tier].damage
        or known is None
        or not same_checkpoint(known, checked.commit)
    ):
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
    source = _open_whole(checkpoint, held, reader)
    attempt = writing_attempt(reader, listings, source.commit.lineage, store)
    there = next(listing for listing in listings if listing.tier == tier)
    needed = source.commit.stored_bytes - there.unfinished.get(id, 0)
    check_room(config, there, needed, doing="copy to")
    store.check_room(needed)
    commit = write_copy(source, store, config, attempt, counter.add)
    return CopyResult(
        id=id,
        tier=tier,
        bytes=commit.stored_bytes,
        sources=dict(source.images.tally.bytes),
        notes=finish_copy(source, store, config, checkpoint, listings),
    )


def _open_whole(checkpoint: KnownCheckpoint, tiers: Sequence[str], reader: RunReader) -> Source:
    """Open a checkpoint as ``open_source`` does. Raises IntegrityError if an image of some rank cannot be read."""
    source = open_source(checkpoint, tiers, reader.opener())
    source.images.manifests(range(source.commit.world_size))  # before anything is written
    return source


def write_copy(
    source: Source,
    store: StoredTier,
    config: Config,
    attempt: Attempt,
    on_bytes: Callable[[int], None],
    *,
    shards: Iterable[Shard] | None = None,
    owed: tuple[CheckpointId, ...] = (),
    repairs: bool = False,
    before_commit: Callable[[], None] = lambda: None,
) -> Commit:
    """Write the images of all ranks, or of ``shards``, and the commit record; in place of a damaged copy, if it
    ``repairs`` one: what the tier was ``owed`` is only in its own record. ``before_commit`` is called once all images
    are there, and may raise."""
    run, world_size = source.commit.lineage.run, source.commit.world_size
    if shards is None:
        shards = [Shard(rank, world_size) for rank in range(world_size)]
    limits = lane_limits(store, config)
    files = send(source, store, limits, shards, attempt=attempt, on_bytes=on_bytes, anew=repairs)
    before_commit()
    # What another process has left there, and was not continued.
    store.backend.discard_unfinished(keys.step_prefix(run, source.commit.lineage.checkpoint))
    return commit_copy(source.commit, store, files, attempt=attempt, owed=owed, repairs=repairs)


def finish_copy(
    source: Source,
    store: StoredTier,
    config: Config,
    checkpoint: KnownCheckpoint,
    listings: tuple[Listing, ...],
) -> tuple[str, ...]:
    """Have ``latest`` of a tier name a checkpoint that was copied there. Return notes: what was skipped, what failed,
    and what the tier's retention will delete. ``listings`` are from before the copy."""
    after = tuple(store.list() if x.tier == store.name else x for x in listings)
    return (
        *(f"skipped: {f.what}: {f.reason}" for f in source.images.tally.fallbacks),
        *name_latest(store, checkpoint, merge(listings)),
        *_notes_on_retention(config, store.name, checkpoint.id, listings, after),
    )


def name_latest(
    store: StoredTier, checkpoint: KnownCheckpoint, known: Iterable[KnownCheckpoint]
) -> tuple[str, ...]:
    """Have ``latest`` of a tier name a checkpoint that was committed there, unless it is abandoned or the tier holds a
    newer one of the live lineage; return a note where that failed."""
    live = [c for c in known if store.name in c.copies and not c.abandoned]
    if checkpoint.abandoned or any(c.id > checkpoint.id for c in live):
        return ()
    try:
        store.write_latest(checkpoint.id)
    except BackendError as error:  # the checkpoint is committed all the same
        return (f"{store.name}: could not write 'latest': {error}",)
    return ()


def _notes_on_retention(
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
                f"by prune ({reason}); to keep it: tierfall pin {other}"
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
        config, owed = self._reader.config, copy.commit.owed if copy.commit else ()
        with open_writable(config, copy.tier) as store:
            self._check_ours(store, copy, checkpoint)
            store.decided.read()
            source = _open_whole(checkpoint, self._sources(store, checkpoint, copy), self._reader)
            line = source.commit.lineage
            attempt = writing_attempt(self._reader, self._listings, line, store)
            write_copy(source, store, config, attempt, lambda count: None, owed=owed, repairs=True)
        return f"rewritten from {', '.join(source.images.tally.bytes)}"

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

    def repair_tier(self, tier: str, files: Iterable[str]) -> None:
        """Rewrite damaged records of attempts from other tiers, and ``latest`` where it names a missing checkpoint."""
        for file in files:
            is_latest = file == keys.LATEST_NAME
            try:
                why = self._repair_latest(tier) if is_latest else self._repair_attempt(tier, file)
            except TierfallError as error:
                self._note(tier, None, file, str(error), done=False)
            else:
                self._note(tier, None, file, why, done=True)

    def _repair_attempt(self, tier: str, file: str) -> str:
        number = keys.parse_attempt(file.rpartition("/")[2]) or 0
        for other in (x.tier for x in self._listings if x.tier != tier and number in x.attempts):
            try:
                attempt = self._reader.stores[other].fence.read(number)
            except TierfallError:
                continue
            with open_writable(self._reader.config, tier) as store:
                put_object(store.backend, f"{self._reader.run}/{file}", attempt.encode())
            return f"rewritten from {other}"
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
