"""``tierfall prefetch``: bring what a restore would choose to a disk of this node before its job starts.

``choose`` names the checkpoint, and the engine of offline work (``ops/sync.py``) copies it, and continues what an
earlier call has left. It writes nothing to host memory, which belongs to the trainer that starts.

It takes the run's lock at the beginning and for the commit, not while it copies: a trainer that starts meanwhile, as on
a spare node, is not held up. That one deletes what is unfinished, and its attempt fences the prefetch: nothing is
published any more. A lock of its own keeps another prefetch from sending the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tierfall.backends.posix.system import translated
from tierfall.config import Config
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import KnownCheckpoint, Listing, decided_in
from tierfall.core.format.commit_files import shards_of
from tierfall.core.restore.candidates import RestoreRequest, choose
from tierfall.core.runtime.run_lock import RunLock
from tierfall.core.types.errors import (
    CapacityError,
    FencedError,
    IntegrityError,
    StepError,
    StorageFullError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.ops.commands import check_room, owned_folder
from tierfall.ops.reader import RunReader
from tierfall.ops.sync import (
    add_decided,
    check_alone,
    finish_copy,
    open_source,
    open_writable,
    write_copy,
    writing_attempt,
)
from tierfall.telemetry.progress import Progress, Watch

COMMAND = "tierfall prefetch"
NodePart = tuple[int, int]
"""The number of this node, from 0, and how many nodes there are: of the ranks in their order it has its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """The outcome of a prefetch. Without ``id`` there is no checkpoint yet. ``tier`` got its images of ``ranks``, of so
    many ``bytes``; None: nothing was to be done, as the tiers ``holding`` have them, or as a note says. ``sources`` and
    ``decided`` are as in a ``CopyResult``."""

    id: CheckpointId | None = None
    tier: str | None = None
    holding: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    bytes: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def already(self) -> bool:
        return bool(self.holding)


def prefetch(
    config: Config,
    request: RestoreRequest,
    *,
    to: str | None = None,
    part: NodePart | None = None,
    watch: Watch = lambda done, total: None,
) -> PrefetchResult:
    """Bring what a restore would choose by a ``request`` to the tier ``to``; by default to the fastest disk of this
    node that has room for it. If a checkpoint is damaged in every copy, an older one is brought, as it is restored.

    Raises LockError where a trainer of this machine is alive, RestoreError where a tier that may hold something newer
    cannot be read, CapacityError where no tier has room, FencedError where a newer attempt starts meanwhile, StepError
    where a trainer on another node may be writing there, and the error of a tier that cannot be read or written. What
    was sent before such an error is there when the call is repeated; else the next start deletes it.
    """
    notes: list[str] = []
    lost: TierfallError | None = None
    with ExitStack() as held:
        with owned_folder(config, COMMAND) as folder:  # no trainer is alive
            lock = folder / "prefetch.lock"
        held.callback(
            RunLock.acquire(lock, run=config.run, command=COMMAND, wait_s=config.max_wait_s).release
        )
        reader = held.enter_context(RunReader(config))
        while True:
            listings, new = reader.list_with_new()
            candidates = choose(listings, request, ReadTally())
            if not candidates and lost is None:
                return PrefetchResult()
            if not candidates:
                assert lost is not None
                raise lost
            try:
                with ExitStack() as owned:
                    one = _Prefetch(reader, listings, new, candidates[0], part, watch, owned)
                    done = one.run(to)
            except FencedError as error:
                raise FencedError(
                    f"prefetch: a newer start of the run goes on without it: {error}"
                ) from error
            except IntegrityError as error:
                if request.step is not None:
                    raise
                lost, id = error, candidates[0].id
                notes.append(f"{id} is passed over: {error}")
                request = replace(request, without=request.without | {id})
            else:
                return replace(done, notes=(*notes, *done.notes))


@dataclass(slots=True)
class _Prefetch:
    """One try to bring one checkpoint. ``new`` are the tiers whose folder is to be created; ``owned`` gets the run's
    lock."""

    reader: RunReader
    listings: tuple[Listing, ...]
    new: Sequence[str]
    checkpoint: KnownCheckpoint
    part: NodePart | None
    watch: Watch
    owned: ExitStack

    def run(self, to: str | None) -> PrefetchResult:
        id, config = self.checkpoint.id, self.reader.config
        refusals: list[TierfallError] = []
        for name in self._targets() if to is None else [to]:
            wanted = self._wanted(name)
            ranks = tuple(shard.rank for shard in wanted)
            if not wanted:
                return PrefetchResult(id=id, notes=("there are fewer ranks than nodes",))
            order = [tier.name for tier in config.chain]
            as_fast = [name] if to is not None else order[: order.index(name) + 1]
            holding = self._holding(as_fast, wanted)
            if holding:
                return PrefetchResult(id=id, holding=holding, ranks=ranks)
            try:
                return self._bring(name, wanted)
            except (CapacityError, StorageFullError) as error:
                refusals.append(error)
        if refusals:
            raise CapacityError("; ".join(map(str, refusals)))
        note = "no tier is a disk of this node: declare one (kind: file, shared: false)"
        return PrefetchResult(id=id, notes=(note,))

    def _targets(self) -> Iterator[str]:
        """Yield the disks of this node, fastest first."""
        for tier in self.reader.config.written:
            if tier.folder is not None and tier.shared is not True:
                yield tier.name

    def _wanted(self, tier: str) -> list[Shard]:
        """Return the images to bring: those of this node's part, else of the ranks that the newest record on the tier
        names, if it names only some of as many ranks; else all. What the tier has of this checkpoint stays with it."""
        commit = self.checkpoint.commit
        if commit is None:
            raise self.checkpoint.unread or IntegrityError(
                f"{self.checkpoint.id}: no tier has a good commit record of it"
            )
        size = commit.world_size
        shards = [Shard(rank, size) for rank in range(size)]
        copies = next(x.copies for x in self.listings if x.tier == tier)
        records = {copy.id: copy.commit for copy in copies if copy.commit is not None}
        there = records.get(self.checkpoint.id)
        if self.part is not None:
            number, nodes = self.part
            chosen = shards[number * size // nodes : (number + 1) * size // nodes]
        else:
            newest = max((id for id, x in records.items() if x.world_size == size), default=None)
            chosen = shards_of(records[newest]) if newest is not None else shards
        return sorted({*chosen, *(shards_of(there) if there else ())}, key=lambda one: one.rank)

    def _holding(self, tiers: Sequence[str], wanted: Sequence[Shard]) -> tuple[str, ...]:
        """Return those of ``tiers`` that have good copies, if these have all images that are wanted; else none."""
        good = {
            tier: {*shards_of(copy.commit)}
            for tier in tiers
            if (copy := self.checkpoint.copies.get(tier)) and copy.commit and not copy.damage
        }
        return tuple(good) if {*wanted} <= set[Shard]().union(*good.values()) else ()

    def _bring(self, tier: str, wanted: Sequence[Shard]) -> PrefetchResult:
        reader, listings, checkpoint = self.reader, self.listings, self.checkpoint
        id, there = checkpoint.id, next(x for x in listings if x.tier == tier)
        held = [x.tier for x in listings if x.tier in checkpoint.copies]
        source = open_source(checkpoint, held, reader.opener())
        ranks = tuple(shard.rank for shard in wanted)
        total = sum(manifest.image_bytes for manifest in source.images.manifests(ranks).values())
        needed = self._check_tier(there, total)
        progress = Progress(self.watch, total)
        with open_writable(reader.config, tier) as store:
            store.check_room(needed)
            attempt = writing_attempt(reader, listings, source.commit.lineage, store)
            try:
                write_copy(
                    source,
                    store,
                    reader.config,
                    attempt,
                    progress.add,
                    shards=wanted,
                    before_commit=self._before_commit,
                )
            except IntegrityError:
                if not store.is_committed(id):  # else it has images of other ranks
                    store.discard(id, attempt=attempt)
                raise
            decided = add_decided(store, decided_in(listings).of(id, checkpoint.attempt_id))
            notes = finish_copy(source, store, reader.config, checkpoint, listings)
        sources = dict(source.images.tally.bytes)
        return PrefetchResult(
            id=id,
            tier=tier,
            ranks=ranks,
            bytes=total,
            sources=sources,
            decided=decided,
            notes=notes,
        )

    def _check_tier(self, there: Listing, total: int) -> int:
        """Return how many bytes a tier lacks of the images, of ``total`` bytes. Raise why they cannot be brought to it.
        Create the folder of a new one."""
        tier, config, copy = there.tier, self.reader.config, there.copy(self.checkpoint.id)
        if there.error is not None:
            raise there.error
        if copy is not None and copy.damage is not None:
            id = self.checkpoint.id
            raise StepError(
                f"prefetch: {tier} holds {id} already, and {copy.damage}: a restore reads its good chunks there, and "
                f"the others elsewhere. To repair it: tierfall verify {id} --tier {tier} --repair"
            )
        section = next(section for section in config.stored if section.name == tier)
        if section.shared is not False:
            advice = f", or say shared: false if {tier} is a disk of each node"
            how = {"doing": "prefetch", "advice": advice}
            check_alone(self.reader, self.listings, self.checkpoint, tier, **how)
        arrived = there.unfinished.get(self.checkpoint.id, 0) + (copy.bytes if copy else 0)
        needed = max(0, total - arrived)
        check_room(config, there, needed, doing="prefetch to")
        if (folder := section.folder) is None:
            return needed
        with translated(f"open the tier's folder {folder}"):
            if tier in self.new:  # as an open does
                folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        if free < needed:
            raise CapacityError(
                f"prefetch to {tier}: it needs {format_size(needed)}, and {format_size(free)} are free in {folder}: "
                "free space there"
            )
        return needed

    def _before_commit(self) -> None:
        """Take the run's lock; raise LockError if a trainer has it. Raise, too, unless a stored source still has the
        checkpoint: it, or its run, may have been deleted meanwhile. Another node deletes nothing in memory."""
        self.owned.enter_context(owned_folder(self.reader.config, COMMAND))
        stores, id = self.reader.stores, self.checkpoint.id
        unread: TierfallError | None = None
        stored = [tier for tier in self.checkpoint.copies if tier in stores]
        for tier in stored:
            try:
                if stores[tier].find_copy(id) is not None:
                    return
            except TierfallError as error:
                unread = error
        if stored:
            raise unread or IntegrityError(f"{id} was deleted while it was read: no copy is left")
