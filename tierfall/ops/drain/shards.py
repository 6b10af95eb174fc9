"""Draining the memory of several ranks: what a job that died has left in all slots of this machine goes to the tiers.

A tier that every node sees gets this machine's parts, and the commit record from whoever finds that all parts are
there: it is created if absent, so two machines may do so at once. A node's own disk gets its parts with their record.
Where this machine holds all ranks, what not all of them had sealed is no checkpoint, and stays behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.config.sections import OnClose
from tierfall.core.copies.shard_reader import image_opener
from tierfall.core.format.catalog import KnownCheckpoint, Listing, merge
from tierfall.core.format.commit_files import document_file, plain, shards_of
from tierfall.core.format.documents import sha256
from tierfall.core.format.records import Attempt, Commit, Manifest, Mark, NamedFile, read_manifest
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    CapacityError,
    FencedError,
    IntegrityError,
    KeyNotFoundError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, Codec, Shard
from tierfall.ops.commands import unread, view_of
from tierfall.ops.drain.turns import DrainOrder
from tierfall.ops.local_memory import LocalMemory, Parts
from tierfall.ops.write_copy import CheckpointSource, leave_index, origin, write_parts
from tierfall.policies.defaults import plan_eviction
from tierfall.setup.tiers import lane_limits
from tierfall.tiers.stored import StoredTier

POLL_S = 0.2
Tier = FileTierConfig | ObjectTierConfig


class OutOfTimeError(TierfallError):
    """The deadline of a drain has passed."""


@dataclass(slots=True)
class PartsDrain:
    """One drain. ``brought`` are copies whose parts of this machine are on a tier where others' are not yet."""

    config: Config
    memory: LocalMemory
    stores: Mapping[str, StoredTier]
    listings: tuple[Listing, ...]
    attempt: Attempt
    ends_s: float | None
    on_bytes: Callable[[int], None]
    tell: Callable[[str], None] = lambda line: None
    done: list[tuple[CheckpointId, str]] = field(default_factory=list)
    brought: list[tuple[CheckpointId, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    parts: Parts = field(init=False)
    turns: DrainOrder = field(init=False)

    def __post_init__(self) -> None:
        self.parts = self.memory.parts()
        self.turns = DrainOrder(self.config, self.listings, self.ends_s, self.tell)

    # What is to be done ----------------------------------------------------------------------------

    def plan(self) -> list[tuple[CheckpointId, str]]:
        """Name what is owed of what lies in memory, oldest first; say what is no checkpoint."""
        known = {c.id: c for c in merge(self.listings)}
        owed = []
        for view in view_of(self.config, tuple(known.values())).checkpoints:
            if view.id not in self.parts or not view.owed:
                continue
            lacking = self._lacking(known[view.id])
            if lacking and self.memory.count >= _world_size(known[view.id]):
                self.problems_of_none(view.id, lacking)
                continue
            owed += [(view.id, tier.name) for tier in self.config.stored if tier.name in view.owed]
        return owed

    def problems_of_none(self, id: CheckpointId, lacking: int) -> None:
        if unread(self.listings):
            self.problems.append(
                f"{id}: {lacking} of its parts are not in memory; a tier that could not be read may have them"
            )

    def _lacking(self, known: KnownCheckpoint) -> int:
        return _world_size(known) - len(_at_hand(known))

    # Bringing --------------------------------------------------------------------------------------

    def bring(self, id: CheckpointId, tier: str) -> None:
        """Bring this machine's parts of a checkpoint to a tier, and commit it where all are there."""
        known = next(c for c in merge(self.listings) if c.id == id)
        store = self.stores[tier]
        store.check_fence(self.attempt)
        missing = self._not_there(known, store)
        if missing:
            source = self._origin(known, missing, without=tier)
            self._make_room(store, source.commit)
            began = time.monotonic()
            write_parts(store, lane_limits(store, self.config), source, self._count)
            self.turns.note(tier, source.commit.image_bytes, time.monotonic() - began)
        if not self.commit(id, tier):
            self.brought.append((id, tier))

    def _count(self, count: int) -> None:
        self.on_bytes(count)
        self.check_time()

    def check_time(self) -> None:
        if self.ends_s is not None and time.monotonic() >= self.ends_s:
            raise OutOfTimeError("the deadline has passed")

    def _not_there(self, known: KnownCheckpoint, store: StoredTier) -> list[Shard]:
        return [
            shard
            for shard, digest in self._parts_for(known, store.name)
            if _manifest_on(store, known.id, shard) != digest
        ]

    def _parts_for(self, known: KnownCheckpoint, tier: str) -> list[tuple[Shard, str | None]]:
        """List what is this machine's to bring to a tier: on a disk of its own, what its ranks had saved."""
        parts = self._parts_at_hand(known, without=tier)
        if self.memory.count < _world_size(known) and not self._is_shared(tier):
            return [(shard, digest) for shard, digest in parts if shard in self.parts[known.id]]
        return parts

    def _parts_at_hand(
        self, known: KnownCheckpoint, *, without: str
    ) -> list[tuple[Shard, str | None]]:
        """List the parts that other places here have, each with the digest of its manifest."""
        found: dict[Shard, str | None] = {}
        for tier, copy in known.copies.items():
            if tier == without or copy.commit is None:
                continue
            for shard in shards_of(copy.commit):
                named = copy.commit.file(keys.manifest_name(shard))
                found.setdefault(shard, named.digest if named else None)
        return sorted(found.items(), key=lambda item: item[0].rank)

    def _origin(
        self, known: KnownCheckpoint, shards: Sequence[Shard], *, without: str
    ) -> CheckpointSource:
        tiers = [x.tier for x in self.listings if x.tier in known.copies and x.tier != without]
        regions = {(id, s): held.region for id, of in self.parts.items() for s, held in of.items()}
        return origin(
            known, tiers, image_opener(self.stores, self.config.host.name, regions), shards
        )

    def _make_room(self, store: StoredTier, commit: Commit) -> None:
        """Drop from a tier with a capacity what may go, as a trainer does before it begins a copy."""
        capacity = next(t.capacity_bytes for t in self.config.stored if t.name == store.name)
        if capacity is None:
            return
        there = store.list()
        used = sum(copy.bytes for copy in there.copies) + sum(there.unfinished.values())
        need = commit.image_bytes
        listings = tuple(there if x.tier == store.name else x for x in self.listings)
        view = view_of(self.config, merge(listings))
        plan = plan_eviction(view, store.name, need_bytes=need, free_bytes=capacity - used)
        if plan.missing_bytes:
            raise CapacityError(
                f"it needs {format_size(need)}, and {format_size(plan.missing_bytes)} of the capacity of "
                f"{format_size(capacity)} are lacking: raise it, unpin some, or delete some"
            )
        for drop in plan.drops:
            store.drop(drop.checkpoint, attempt=self.attempt)

    # Committing ------------------------------------------------------------------------------------

    def commit(self, id: CheckpointId, tier: str) -> bool:
        """Commit a checkpoint on a tier if all that belongs there is there; say whether it is committed."""
        known = next(c for c in merge(self.listings) if c.id == id)
        store = self.stores[tier]
        if not store.holds(id):
            world = _world_size(known)
            shards = [Shard(rank, world) for rank in range(world)]
            if self.memory.count < world and not self._is_shared(tier):
                shards = [shard for shard, _ in self._parts_for(known, tier)]
            files = _files_there(store, known, shards)
            if files is None:
                return False
            assert known.commit is not None
            pinned = keys.PIN_MARK in known.marks
            wall_time_s = known.commit.wall_time_s
            mark = Mark(name=keys.PIN_MARK, checkpoint=id, wall_time_s=wall_time_s)
            commit = replace(plain(known.commit), files=files)
            store.commit(
                leave_index(store, commit) if len(shards) == world else commit,
                attempt=self.attempt,
                marks=(mark,) if pinned else (),
            )
        else:
            store.settle(id)
        self.done.append((id, tier))
        self._name_latest(store, id)
        return True

    def _is_shared(self, name: str) -> bool:
        """Say whether all nodes see a tier: as it is set, or as the records there tell.

        Raises IntegrityError, which says what to set, where neither does.
        """
        tier = next(t for t in self.config.stored if t.name == name)
        if isinstance(tier, ObjectTierConfig):
            return True
        if tier.shared is not None:
            return tier.shared
        there = next(x for x in self.listings if x.tier == name)
        for copy in there.copies:
            if copy.commit is not None and copy.commit.world_size > self.memory.count:
                return len(shards_of(copy.commit)) == copy.commit.world_size
        raise IntegrityError(
            f"whether all nodes see {name} is not known here: say so in the configuration (shared: true, or false)"
        )

    def _name_latest(self, store: StoredTier, id: CheckpointId) -> None:
        latest = store.read_latest()
        if latest is None or latest < id:
            store.name_latest(id)

    def wait_for_others(self, patience_s: float) -> None:
        """Commit what was brought, once other machines' drains have brought theirs; for so long at most."""
        until = time.monotonic() + patience_s
        if self.ends_s is not None:
            until = min(until, self.ends_s)
        while self.brought:
            for id, tier in list(self.brought):
                if self.commit(id, tier):
                    self.brought.remove((id, tier))
            if not self.brought or time.monotonic() >= until:
                return
            time.sleep(POLL_S)

    def must_keep(self, planned: Sequence[tuple[CheckpointId, str]]) -> bool:
        """Say whether memory holds what a tier is still owed, or what none has."""
        if self.config.host.on_close is OnClose.KEEP or set(planned) - set(self.done):
            return True
        known = {c.id: c for c in merge(self.listings)}
        durable = {id for id, _ in self.done}
        durable |= {c.id for c in known.values() if c.copies.keys() - {self.config.host.name}}
        whole = [id for id in self.parts if not (known[id].abandoned or known[id].tombstoned)]
        whole = [
            id
            for id in whole
            if not self._lacking(known[id]) or self.memory.count < _world_size(known[id])
        ]
        pinned = [id for id in whole if known[id].pinned]
        return any(id not in durable for id in (*pinned, *whole[-1:]))


def drain_parts(
    drain: PartsDrain, planned: Sequence[tuple[CheckpointId, str]], patience_s: float
) -> None:
    """Bring what is planned; what goes wrong with one copy is noted, and the others are brought all the same.

    Raises FencedError where a newer attempt of the run exists.
    """
    for id, tier in drain.turns.turns(planned):
        try:
            drain.check_time()
            if tier not in drain.stores:
                continue  # it is said that it could not be read
            drain.bring(id, tier)
        except (FencedError, OutOfTimeError) as error:
            if isinstance(error, FencedError):
                raise
            break
        except TierfallError as error:
            drain.problems.append(f"flush of {id} to {tier}: {error}")
    try:
        drain.wait_for_others(patience_s)
    except FencedError:
        raise
    except TierfallError as error:
        drain.problems.append(str(error))
    for id, tier in drain.brought:
        drain.problems.append(
            f"{id} on {tier}: this machine's parts are there, and other ranks' are not yet: drain the other machines, "
            "the last one commits it"
        )


def _world_size(known: KnownCheckpoint) -> int:
    assert known.commit is not None
    return known.commit.world_size


def _at_hand(known: KnownCheckpoint) -> set[Shard]:
    records = [copy.commit for copy in known.copies.values() if copy.commit is not None]
    return set().union(*map(shards_of, records))


def _manifest_on(store: StoredTier, id: CheckpointId, shard: Shard) -> str | None:
    """Return the digest of a part's manifest on a tier, which comes after its image; None where there is none."""
    try:
        return sha256(store.read_manifest(id, shard))
    except KeyNotFoundError:
        return None


def _files_there(
    store: StoredTier, known: KnownCheckpoint, shards: Sequence[Shard]
) -> tuple[NamedFile, ...] | None:
    """Name the files of these parts as they are on a tier; None where one is not all there."""
    sizes = {stored.key: stored.bytes for stored in store.files(known.id)}
    files: list[NamedFile] = []
    for shard in shards:
        if keys.manifest_name(shard) not in sizes:
            return None
        data = store.read_manifest(known.id, shard)
        manifest = read_manifest(data, what=f"{store.name}: manifest of {known.id}")
        assert known.commit is not None
        if manifest.line != known.commit.line:
            raise IntegrityError(
                f"{store.name}: rank {shard.rank}'s part of {known.id} is of another life"
            )
        image = _image_there(store, manifest, sizes)
        if image is None:
            return None
        files += [*image, document_file(keys.manifest_name(shard), data)]
    return tuple(files)


def _image_there(
    store: StoredTier, manifest: Manifest, sizes: Mapping[str, int]
) -> tuple[NamedFile, ...] | None:
    shard, id = manifest.shard, manifest.line.checkpoint
    for codec in Codec:
        name = keys.shard_name(shard, codec)
        if name not in sizes:
            continue
        if codec is Codec.NONE:
            if sizes[name] == manifest.image_bytes:
                return (NamedFile(name=name, bytes=sizes[name], digest=None),)
        elif keys.stored_name(shard) in sizes:
            record = document_file(keys.stored_name(shard), store.read_stored(id, shard))
            raw_bytes = manifest.image_bytes
            packed = NamedFile(name=name, bytes=sizes[name], digest=None, raw_bytes=raw_bytes)
            return (packed, record)
    return None
