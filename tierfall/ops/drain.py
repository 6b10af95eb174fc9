"""``tierfall drain``: flush what a dead trainer left in host memory, by a session and its coordinator.

It writes on behalf of the attempt that left the images: where a newer attempt exists, the fence stops it. The owed
copies are listed before the first is begun; memory is freed once all of them are durable.

The machines of a job that died exchange no messages: each uploads its own images, and reads on a shared tier which ones
the others have uploaded. The last one commits; the commit record is created if absent, so two may do so at once. A
node's own disk gets its images with a record of these alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.commit_files import packed_files, raw_files, shards_of
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Attempt, Commit, Manifest, NamedFile, parse_manifest
from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.types import keys
from tierfall.core.types.errors import FencedError, IntegrityError, KeyNotFoundError, TierfallError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, Codec, CopyState, Shard
from tierfall.core.types.view import ArrivalOutlook
from tierfall.ops.commands import POLL_S, Watch, unread, view_of
from tierfall.policies.drain import describe_drain
from tierfall.session.leftovers import images_in
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.requests import must_keep_memory
from tierfall.session.session import Session
from tierfall.session.start import Start
from tierfall.setup.attempts import attempt_of, ids_by_commits, newest_attempt
from tierfall.setup.places import run_folder, seen_by_one
from tierfall.setup.tiers import ANSWER_S, close_stores, open_stores
from tierfall.tiers.arena.folder import prepare_folder
from tierfall.tiers.host import SealedImage, arena_slots
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
RETRY_S = 2.0
"""Seconds between tries to open a tier that does not answer."""


class AwaitedShardsError(TierfallError):
    """Images that other machines upload are not on the tier yet, or are of another checkpoint.

    It is retryable: a commit that fails for good makes the coordinator delete what is on the tier, of all machines. The
    tier accepts the next copy meanwhile.
    """

    retryable: ClassVar[bool] = True
    awaits_others: ClassVar[bool] = True


@dataclass(slots=True)
class MachineShards:
    """Prepares a session that drains the memory of several ranks: ``prepare`` before it is built, ``add_stored`` after.

    ``slots`` is the number of ranks that have left memory on this machine; ``unknown`` are the tiers that may or may
    not be shared; ``problems`` name what cannot be flushed, each with the reason.
    """

    tiers: OpenedTiers
    slots: int
    problems: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    _world_size: int = 1
    _shared: set[str] = field(default_factory=set)
    _known: Mapping[CheckpointId, KnownCheckpoint] = field(default_factory=dict)
    _inherited: tuple[Commit, ...] = ()

    @property
    def are_all_here(self) -> bool:
        """Whether every rank of the job has left memory on this machine."""
        return self.slots >= self._world_size

    def prepare(self, owed_to: Collection[str]) -> tuple[Commit, ...]:
        """Return the records of the checkpoints to flush, and find which of the tiers ``owed_to`` all machines see."""
        tiers = self.tiers
        images = images_in(tiers.hosts())
        self._world_size = max(image.commit.world_size for _, image in images)
        self._known = {known.id: known for known in merge(tiers.listings)}
        self._inherited = tuple(self._committable({id for id, _ in images}))
        for tier in tiers.config.stored:
            if tier.name not in owed_to or tier.name not in tiers.stores:
                continue
            try:
                if self.are_all_here or self._is_shared(tier):
                    self._shared.add(tier.name)
            except IntegrityError as error:
                self.unknown.add(tier.name)
                self.problems.append(str(error))
                tiers.exclude(tier.name, error)
        tiers.set_shared({tier.name: tier.name in self._shared for tier in tiers.config.stored})
        return self._inherited

    def _committable(self, ids: set[CheckpointId]) -> Iterator[Commit]:
        """Give the records of the checkpoints in memory that may be whole; what not all ranks sealed is none."""
        for id in sorted(ids):
            known = self._known[id]
            if known.commit is None or known.commit.world_size == 1:
                continue
            records = [copy.commit for copy in known.copies.values() if copy.commit is not None]
            at_hand = {shard for record in records for shard in shards_of(record)}
            lacking = known.commit.world_size - len(at_hand)
            if not lacking or not self.are_all_here:
                yield known.commit
            elif self._has_unread:
                self.problems.append(
                    f"{id}: {lacking} of its images are not in memory; what could not be read may have them"
                )

    @property
    def _has_unread(self) -> bool:
        return any(listing.unread is not None for listing in self.tiers.listings)

    def may_flush(self, id: CheckpointId) -> bool:
        """Whether a checkpoint is of one rank, or of several whose images may all be found."""
        commit = self._known[id].commit
        one_rank = commit is not None and commit.world_size == 1
        return one_rank or any(record.lineage.checkpoint == id for record in self._inherited)

    def _is_shared(self, tier: FileTierConfig | ObjectTierConfig) -> bool:
        """Whether all machines see a tier: by the configuration, or by the records there.

        Raises IntegrityError, which names the key to set, where neither decides it.
        """
        if isinstance(tier, ObjectTierConfig):
            return True
        if tier.shared is not None:
            return tier.shared
        listing = next(x for x in self.tiers.listings if x.tier == tier.name)
        for copy in listing.copies:
            if copy.commit is not None and copy.commit.world_size > self.slots:
                return len(shards_of(copy.commit)) == copy.commit.world_size
        raise IntegrityError(
            f"whether all nodes see {tier.name} is not known here: set it in the configuration (shared: true, or false)"
        )

    def add_stored(self, session: Session) -> None:
        """Add the images that only other tiers have to what this machine uploads, and leave out what is uploaded."""
        if not self._has_unread:  # what lacks images is no checkpoint
            session.leftovers.partial_images.clear()
        for entry in session.leftovers.whole_images:
            assert entry.shards is not None
            entry.shards = (*entry.shards, *self._stored_shards(entry))
            for part in entry.shards:
                shared = self._shared & session.coordinator.lanes.keys()
                part.uploaded_to.update(tier for tier in shared if self._is_on(part, tier))

    def _stored_shards(self, entry: LedgerEntry) -> Iterator[LedgerEntry]:
        assert entry.shards is not None
        here = {part.shard for part in entry.shards}
        for tier, copy in self._known[entry.id].copies.items():
            store = self.tiers.stores.get(tier)
            if store is None or copy.commit is None:
                continue
            for shard in [shard for shard in shards_of(copy.commit) if shard not in here]:
                try:
                    data = store.read_manifest(entry.id, shard)
                    manifest = parse_manifest(data, what=f"{tier}: manifest of {entry.id}")
                except TierfallError as error:
                    self.problems.append(f"{entry.id} on {tier}: {error}")
                    continue
                part = entry.from_other_rank(shard, None, manifest)
                # Peer memory of this node has other ranks' images, and not its own.
                part.states = {**part.states, tier: CopyState.COMMITTED}
                yield part
                here.add(shard)

    def _is_on(self, part: LedgerEntry, tier: str) -> bool:
        """Whether a shard's image and manifest are on a tier, uploaded by an earlier drain."""
        assert part.manifest is not None
        try:
            data = self.tiers.stores[tier].read_manifest(part.id, part.shard)
        except KeyNotFoundError:
            return False
        return sha256(data) == sha256(part.manifest.encode())

    def complete(self, commit: Commit, tier: str) -> Commit:
        """Return the record with the images of all ranks, by what is on a tier that all machines see.

        Raises AwaitedShardsError where one is not there.
        """
        if tier not in self._shared or len(shards_of(commit)) == commit.world_size:
            return commit
        store = self.tiers.stores[tier]
        shards = [Shard(rank, commit.world_size) for rank in range(commit.world_size)]
        files = _files_there(store, commit, shards)
        if files is None:
            raise AwaitedShardsError(
                f"{commit.lineage.checkpoint} on {tier}: this machine's images are there, other ranks' are not yet: "
                "drain the other machines, the last one commits it"
            )
        return replace(commit, files=files)


def _files_there(
    store: StoredTier, commit: Commit, shards: Sequence[Shard]
) -> tuple[NamedFile, ...] | None:
    """Return the files of these shards as they are on a tier; None where one is incomplete."""
    id = commit.lineage.checkpoint
    sizes = {stored.key: stored.bytes for stored in store.files(id)}
    files: list[NamedFile] = []
    for shard in shards:
        if keys.manifest_name(shard) not in sizes:
            return None
        data = store.read_manifest(id, shard)
        manifest = parse_manifest(data, what=f"{store.name}: manifest of {id}")
        if manifest.lineage != commit.lineage:
            raise AwaitedShardsError(
                f"{id} on {store.name}: the image of rank {shard.rank} there is of another checkpoint of that id"
            )
        image, document = raw_files(shard, image_bytes=manifest.image_bytes, manifest=data)
        if sizes.get(image.name) == image.bytes:
            files += [image, document]
        elif packed := _packed_files(store, manifest, sizes):
            files += [*packed, document]
        else:
            return None
    return tuple(files)


def _packed_files(
    store: StoredTier, manifest: Manifest, sizes: Mapping[str, int]
) -> tuple[NamedFile, ...]:
    shard = manifest.shard
    for codec in set(Codec) - {Codec.NONE}:
        size = sizes.get(keys.shard_name(shard, codec))
        if size is not None and keys.stored_name(shard) in sizes:
            record = store.read_stored(manifest.lineage.checkpoint, shard)
            raw_bytes = manifest.image_bytes
            return packed_files(shard, codec, stored_bytes=size, raw_bytes=raw_bytes, record=record)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedCopy:
    """A copy that a tier is owed; ``bytes`` is its raw size."""

    checkpoint: CheckpointId
    tier: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.checkpoint} to {self.tier} ({format_size(self.bytes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """``done`` are the copies that became durable, ``left`` those that are still owed; ``memory_kept``: host memory was
    not freed."""

    done: tuple[OwedCopy, ...]
    left: tuple[OwedCopy, ...]
    problems: tuple[str, ...]
    memory_kept: bool
    seconds: float


def drain(
    config: Config,
    deadline_s: float | None,
    watch: Watch = lambda done, total: None,
    on_forecast: Callable[[str], None] = lambda line: None,
) -> DrainResult:
    """Flush what host memory holds, for ``deadline_s`` seconds at most (None: until done).

    With a deadline, the most valuable copies come first, a copy that cannot arrive in time is not begun, and a tier
    that cannot be opened is tried again until then.
    ``on_forecast`` is called with a sentence per forecast: at the start, and again once the rates of tiers are known.
    ``watch`` is called with bytes copied and bytes in total.

    Raises FencedError, and writes nothing, where a newer attempt of the run exists; LockError where a trainer is alive.
    """
    began = time.monotonic()
    until_s = None if deadline_s is None else began + deadline_s
    done: list[OwedCopy] = []
    drained, silent = _drain_once(config, until_s, watch, on_forecast)
    while until_s and drained.memory_kept and silent & {owed.tier for owed in drained.left}:
        done += drained.done
        try:
            if not _wait_for_any(config, silent, until_s):
                break
            drained, silent = _drain_once(config, until_s, watch, on_forecast)
        except TierfallError as error:  # a trainer has begun, say
            drained = replace(drained, problems=(*drained.problems, str(error)))
            break
    else:
        done += drained.done
    return replace(drained, done=tuple(done), seconds=time.monotonic() - began)


def _wait_for_any(config: Config, silent: Set[str], until_s: float) -> bool:
    """Wait until one of the tiers ``silent`` can be opened; False once the monotonic clock reaches ``until_s``."""
    logger.warning("drain: tried again until the deadline: %s", ", ".join(sorted(silent)))
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(RETRY_S, left_s))
        stores, errors = open_stores(
            seen_by_one(config), config.run, find_read_only=True, creates=False
        )
        close_stores(stores, ANSWER_S)
        if not silent <= errors.keys():
            return True
    return False


def _drain_once(
    config: Config,
    until_s: float | None,
    watch: Watch,
    on_forecast: Callable[[str], None],
) -> tuple[DrainResult, Set[str]]:
    """Drain to the tiers that can be opened now. Return the result, without its seconds, and the other tiers."""
    slots = len(arena_slots(prepare_folder(run_folder(config, config.run))))
    with ExitStack() as undo:
        tiers = OpenedTiers(
            config, run=config.run, accept_arena=True, draining=True, command="tierfall drain"
        )
        undo.callback(tiers.close, keep=True)
        images = images_in(tiers.hosts())
        if not images:  # the owner of a moment ago has flushed them
            return DrainResult(done=(), left=(), problems=(), memory_kept=False, seconds=0.0), set()
        _, newest = max(images, key=lambda held: (held[0].attempt, held[0].step))
        tiers.write_for(writer_of(newest, tiers))
        planned = _owed(tiers.config, tiers.listings)
        shards = MachineShards(tiers, slots) if tiers.agrees else None
        if shards is None:  # else other machines may be writing
            tiers.discard_unfinished()
            session = Session(tiers, Start())
        else:
            inherited = shards.prepare({owed.tier for owed in planned})
            planned = tuple(owed for owed in planned if shards.may_flush(owed.checkpoint))
            start = Start(inherited=tuple(commit.encode().decode() for commit in inherited))
            session = Session(tiers, start, complete=shards.complete)
        undo.callback(session.abandon)
        if shards is not None:
            shards.add_stored(session)
        session.coordinator.begin_anew()  # else no copy would be evicted for room
        if until_s is not None:  # before the first copy is begun in another order
            session.coordinator.drain_schedule.begin(session, until_s, time.monotonic())
        session.start()
        undo.pop_all()
    kept = True
    try:
        _wait(session, planned, until_s, watch, on_forecast)
        if session.coordinator.fenced is not None:
            raise session.coordinator.fenced
        done = session.call(lambda: _committed(session, planned))
        left = set(planned) - done
        errors = session.coordinator.errors if left else ()  # else the tier has recovered
        problems = [*(shards.problems if shards else ()), *map(str, errors)]
        problems += session.call(lambda: _damaged_beside_memory(session))
        kept = must_keep_memory(session) or bool(left)
    finally:
        session.close(keep_memory=kept)
    # A copy that was under way at the deadline may have been committed meanwhile.
    done |= {owed for owed in planned if _is_committed(session, owed)}
    problems += [
        f"tier {name} could not be read: {error}"
        for name, error in unread(session.listings).items()
        if shards is None or name not in shards.unknown
    ]
    result = DrainResult(
        done=tuple(owed for owed in planned if owed in done),
        left=tuple(owed for owed in planned if owed not in done),
        problems=tuple(problems),
        memory_kept=kept,
        seconds=0.0,
    )
    return result, set(tiers.errors)


def writer_of(newest: SealedImage, tiers: OpenedTiers) -> Attempt:
    """Return the attempt that left the newest image, or a later one that owned this memory after it: it saved nothing
    that memory does not hold, and it is dead, as this process has the locks of this memory.

    Raises FencedError where another later attempt exists, IntegrityError where the record of one is damaged.
    """
    listings, stores = tiers.listings, tiers.stores
    line = newest.commit.lineage
    number = line.checkpoint.attempt
    start = (
        "start the training here: its start looks at all tiers and at this memory, goes on from the newest checkpoint, "
        "and flushes what is still owed. To free this memory: 'tierfall drain --discard'"
    )
    try:
        later = newest_attempt(listings, stores, above=number)
    except IntegrityError as error:
        raise IntegrityError(
            f"drain: {error}: it may be of a newer start than the one that left {tiers.host.path}, and nothing is "
            f"written beside a newer start. If no newer start of run {line.run!r} is alive, {start}"
        ) from error
    if later is None:
        attempt = attempt_of(line)
        # A person has asked for these images to be flushed: a damaged record counts as theirs, unless commit records
        # show that the number is another attempt's.
        for listing in listings:
            if listing.tier in stores and ids_by_commits(listing, number) <= {attempt.id}:
                stores[listing.tier].fence.trust(attempt)
        return attempt
    attempt, tier = later
    remembered = tiers.identities.remembered
    if remembered is None or remembered.attempt_id != attempt.id:
        raise FencedError(
            f"drain: attempt {number} of run {line.run!r} was followed by attempt {attempt.number} (process "
            f"{attempt.pid} on {attempt.node}) by tier {tier}, which did not begin with this memory: nothing of the "
            f"older one is written any more. Once that start has ended, {start}"
        )
    return attempt


def find_owed(config: Config, listings: Sequence[Listing]) -> tuple[OwedCopy, ...]:
    """Return every copy that is owed to a tier that could be read, oldest first: the other tiers may have theirs."""
    silent = unread(listings)
    return tuple(owed for owed in _owed(config, listings) if owed.tier not in silent)


def _owed(config: Config, listings: Sequence[Listing]) -> tuple[OwedCopy, ...]:
    view = view_of(config, merge(listings))
    return tuple(
        OwedCopy(checkpoint=c.id, tier=tier, bytes=max(copy.bytes for copy in c.copies.values()))
        for c in view.checkpoints
        for tier in (t.name for t in config.stored if t.name in c.owed)
    )


def _wait(
    session: Session,
    planned: tuple[OwedCopy, ...],
    until_s: float | None,
    watch: Watch,
    on_forecast: Callable[[str], None],
) -> None:
    """Wait until nothing is owed, or the deadline ``until_s`` of the monotonic clock."""
    total = sum(owed.bytes for owed in planned)
    lanes = session.coordinator.lanes.values()
    is_known, is_first = until_s is None, True
    while True:
        if not is_known:  # the forecast is reported at first, and once every arrival in it is known
            plan = session.call(lambda: session.coordinator.drain_schedule.plan)
            is_known = all(each.outlook is not ArrivalOutlook.UNKNOWN for each in plan)
            for line in describe_drain(plan) if is_first or is_known else ():
                on_forecast(line)
            is_first = False
        left_s = POLL_S if until_s is None else min(POLL_S, max(0.0, until_s - time.monotonic()))
        ended = session.wait_idle(left_s) or (until_s is not None and time.monotonic() >= until_s)
        watch(session.call(lambda: sum(sum(lane.edge_bytes.values()) for lane in lanes)), total)
        if ended:
            return


def _damaged_beside_memory(session: Session) -> list[str]:
    """Return a problem for each damaged copy of an image in memory: no flush rewrites it, ``verify --repair`` does."""
    ledger = session.coordinator.ledger
    return [
        f"{entry.id} is in host memory, and damaged on {tier}: {entry.damage[tier]}: to rewrite it: tierfall verify "
        f"{entry.id} --tier {tier} --repair"
        for entry in ledger.entries.values()
        if entry.state(ledger.host) is CopyState.SEALED and not entry.deleted
        for tier in sorted(entry.repairable)
    ]


def _is_committed(session: Session, owed: OwedCopy) -> bool:
    entry = session.coordinator.ledger.entries.get(owed.checkpoint)
    return entry is not None and entry.state(owed.tier) is CopyState.COMMITTED


def _committed(session: Session, planned: tuple[OwedCopy, ...]) -> set[OwedCopy]:
    """Return the planned copies that became durable. One that retention has deleted since counts, as long as no copy
    was given up or set aside."""
    coordinator = session.coordinator
    counters = coordinator.counters
    left = set(coordinator.owed_copies())
    done = set()
    for owed in planned:
        entry = coordinator.ledger.entries.get(owed.checkpoint)
        damaged = entry is not None and owed.tier in entry.damage  # or it could not be read
        settled = owed.tier in session.stores and not damaged
        settled &= (owed.checkpoint, owed.tier) not in left
        if _is_committed(session, owed) or (
            settled and not counters.given_up_copies + counters.set_aside_copies
        ):
            done.add(owed)
    return done
