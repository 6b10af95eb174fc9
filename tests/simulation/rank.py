"""One rank in miniature: the production planner, policies, tiers and task runner, a memory of its own, and what it can
see of the disks. It lives in a ``Many``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from tests.faults import Fault, Faulty
from tests.memory_backend import MemoryBackend
from tests.simulation.door import Answer, Door, Worker
from tests.simulation.mounts import config_of
from tests.simulation.weather import Outage
from tests.simulation.world import (
    CHUNK,
    CUT,
    DATA_START,
    IMAGE,
    FakeMemory,
    FakeRegion,
    found_in,
    images_of,
    make_records,
    packing,
    reads_anew,
)
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
    Snapshot,
)
from tierfall.core.copies.checkpoint_reader import PASSABLE, find_images
from tierfall.core.copies.chunk_reader import ChunkReader, ReadTally
from tierfall.core.copies.images import Image, RegionImage, StoredImage
from tierfall.core.flush.tasks import CommandKind, Task
from tierfall.core.format.catalog import FoundCopy, Listing, merge
from tierfall.core.format.documents import Spliced, dumps, sha256
from tierfall.core.format.records import Attempt, Lineage
from tierfall.core.ranks.message_tree import (
    DecisionAnnounced,
    RankMessage,
)
from tierfall.core.restore.inventory import TierMessage, describe, unite_copies, unlisted
from tierfall.core.types.errors import (
    BackendError,
    FencedError,
    IntegrityError,
    KeyExistsError,
    LostWriteError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome, Shard
from tierfall.policies.flush import tiers_owed
from tierfall.setup.opened_tiers import with_rest
from tierfall.setup.start import FoundAtStart, Start, next_number
from tierfall.setup.tier_identity import TierIdentities
from tierfall.setup.tiers import make_durable
from tierfall.tiers.peers import PeerCache
from tierfall.tiers.stored import StoredTier

if TYPE_CHECKING:
    from tests.simulation.many import Many


class Unsynced:
    """What is visible on a disk, and goes with a power cut, whoever wrote it."""

    def __init__(self) -> None:
        self.keys: set[str] = set()


class Troubled(Outage):
    """What one rank sees of a disk: its own troubles come and go. ``has_folders``: objects lie in folders that need
    their fsync."""

    def __init__(
        self,
        disk: MemoryBackend,
        *,
        seed: int,
        has_folders: bool = False,
        unsynced: Unsynced | None = None,
    ) -> None:
        self._of_disk = unsynced or Unsynced()
        super().__init__(disk, seed=seed, plan=[])
        self._has_folders, self.bad = has_folders, True

    @property
    def _unsynced(self) -> set[str]:
        return self._of_disk.keys

    @_unsynced.setter
    def _unsynced(self, keys: set[str]) -> None:
        self._of_disk.keys = keys

    def strike(self, plan: Sequence[Fault]) -> None:
        """Have these faults from now on, and no others; what is open already has them too."""
        self._plan = tuple(plan)
        self._count = Faulty(self._inner, seed=0, plan=plan)._count


@lru_cache(maxsize=1024)
def image_of(id: CheckpointId, rank: int) -> bytes:
    """The bytes that a rank's image has: a function of what it is alone."""
    return random.Random(f"{id} of {rank}").randbytes(IMAGE)


def table_of(id: CheckpointId, shard: Shard) -> Spliced:
    """The table of a rank's image: its part of one tensor, which has another name every third step."""
    length = IMAGE - DATA_START
    part = {"offset": [shard.rank * length], "lengths": [length], "start": 0, "end": length}
    whole = {"name": f"w{id.step // 3}", "dtype": "uint8", "shape": [shard.world_size * length]}
    return Spliced(dumps([{**whole, **part}]))


class Rank:
    """One process of the run. Its memory outlives it, ``handles`` are of all its lives."""

    def __init__(self, world: Many, number: int, memory_images: int) -> None:
        self.world = world
        self.number = number
        self.shard = Shard(number, len(world.node_of))
        self.node = world.node_of[number]
        self.memory = FakeMemory(memory_images)
        self.handles: dict[CheckpointId, SaveHandle] = {}
        self.troubles = {tier: world.seen_by(self, tier) for tier in world.stored}
        self.stores: dict[str, StoredTier] = {}
        self.errors: dict[str, TierfallError] = {}
        """The tiers that all ranks go on without, for as long as this process runs."""
        self.listings: tuple[Listing, ...] = ()
        self.attempt: Attempt
        self._read_whole: tuple[str, ...] = ()
        self._found_damage: list[tuple[str, CheckpointId, TierfallError]] = []
        self.tasks: list[Task] = []
        self.next_s: float | None = None
        self.ordinal = 0
        self.listeners: dict[str | int, Callable[[RankMessage], None]] = {}
        self.door: Door

    # A start, step by step -----------------------------------------------------------------------

    def open(self) -> None:
        """Look at all that this rank can see."""
        self.tasks, self.errors, self._read_whole = [], {}, ()
        self.stores = {tier: self._open_store(tier) for tier in self.troubles}
        self._draw = random.Random(f"{self.world.seed} {self.world.starts} {self.number}")
        listings = self._look(newest=self._draw.random() < 0.5)
        self.listings = listings
        config = config_of(self.world.rules[1:])
        machine = cast(Path, self.world.machines[self.node])
        self._config, self._identities = (
            config,
            TierIdentities(config, self.stores, machine, listings),
        )
        self._identities.refuse_aliases()
        missing: dict[str, TierfallError] = dict(self._identities.missing(listings))
        failed = {x.tier: x.error for x in listings if x.error is not None}
        missing |= {tier: failed[tier] for tier in failed.keys() & self.world.unopened}
        self.go_without(missing)
        self.listings = tuple(map(self._made_durable, self.listings))

    def _look(self, *, newest: bool = False) -> tuple[Listing, ...]:
        """List all that this rank can see; ``newest``: as if there were thousands of checkpoints."""
        with patch("tierfall.tiers.stored.FEW", 0):
            stored = [
                self.stores[tier].list(newest=newest)
                if tier not in self.errors
                else Listing(tier=tier, error=self.errors[tier])
                for tier in self.troubles
            ]
        return (self._in_memory(self.memory), *stored)

    def _made_durable(self, found: Listing) -> Listing:
        if found.error or found.tier not in self.stores or not self.owns(found.tier):
            return found
        return make_durable(self.stores[found.tier], found)

    def read_rest(self, *, may_fail: bool = False) -> None:
        """Read the commit records that were left for later. A tier ``may_fail`` to answer now."""
        found = {x.tier: self._made_durable(x) for x in self._look()}
        partial = [x.tier for x in self.listings if x.is_partial]
        for tier in partial if may_fail else ():
            if self._draw.random() < 0.1:
                found[tier] = Listing(
                    tier=tier, error=UnreachableError(f"{tier} has fallen silent")
                )
                self.world.unread.add(tier)
        self.listings = tuple(
            with_rest(x, found[x.tier], is_own=self.owns(x.tier)) if x.tier in partial else x
            for x in self.listings
        )

    def _open_store(self, tier: str) -> StoredTier:
        trouble = self.troubles[tier]
        trouble.strike(())
        trouble.opened()
        return reads_anew(
            StoredTier(
                name=tier,
                run="run",
                backend=trouble,
                packing=packing(self.world.codecs.get(tier)),
                set_identity_check=trouble.set_identity_check,
            )
        )

    def go_without(self, tiers: Mapping[str, TierfallError]) -> None:
        for name in tiers.keys() - self.errors.keys():
            del self.stores[name]
            self.errors[name] = error = tiers[name]
            self.listings = tuple(
                Listing(tier=name, error=error) if x.tier == name else x for x in self.listings
            )

    def owns(self, tier: str) -> bool:
        """Say whether this rank commits, collects and deletes on a tier, and tells the others of it."""
        topology = self.world.network.message_trees[self.number].topology
        return topology.is_root if self.world.shared.get(tier) else topology.is_leader

    def reporters(self) -> dict[str, int]:
        """Return the rank that reports each tier to this one."""
        leader = self.world.network.message_trees[self.number].topology.local_ranks[0]
        return {tier: 0 if shared else leader for tier, shared in self.world.shared.items()}

    def found(self, number: int) -> FoundAtStart:
        """What this rank brings to the agreement on a start."""
        return FoundAtStart(
            number=number,
            partial=any(x.is_partial for x in self.listings),
            unreachable={tier: str(error) for tier, error in self.errors.items()},
            tiers=self.described(),
            unlisted=unlisted(self.listings, self.reporters()),
            nothing=all(x.error is None for x in self.listings)
            and all(known.deleted for known in merge(self.listings)),
        )

    def described(self) -> dict[str, TierMessage]:
        mine = ["host", *(tier for tier in self.world.stored if self.owns(tier))]
        return describe(self.listings, mine=mine)

    def next_number(self) -> int:
        return next_number(self.listings, run="run")

    def adopt(self, attempt: Attempt) -> bool:
        """Save as this attempt from now on; False where a tier knows another one by its number."""
        answered = {x.tier for x in self.listings if x.error is None}
        stores = [s for s in self.stores.values() if not isinstance(s, PeerCache)]
        for store in reversed([s for s in stores if s.name in answered]):
            try:
                store.fence.create(attempt)
            except KeyExistsError:
                return False
            except (UnreachableError, LostWriteError):
                continue  # it gets it before its first commit
        owned = frozenset(filter(self.owns, self.world.stored))
        leads = self.world.network.message_trees[self.number].topology.is_leader
        self._identities.write_records(attempt, self._config, owned=owned, leads=leads)
        self.attempt = attempt
        return True

    def _in_memory(self, *memories: FakeMemory) -> Listing:
        found: dict[CheckpointId, dict[str, FoundCopy]] = {}
        for id, image in [held for memory in memories for held in images_of(memory)]:
            copy = found_in(image.region)
            found.setdefault(id, {})[f"region {len(found.get(id, ()))}"] = copy
        return Listing(
            tier="host", copies=tuple(unite_copies(copies)[0] for copies in found.values())
        )

    def read(self, id: CheckpointId, shard: Shard) -> bool:
        """Read a rank's part of a checkpoint from the fastest copies here that are good; False where none is. What is
        read is what was saved."""
        tally = ReadTally(found_damage=lambda *found: self._found_damage.append(found))
        memories = [rank.memory for rank in self.world.ranks if rank.node == self.node]
        listings = (self._in_memory(*memories), *self.listings[1:])
        known = next((known for known in merge(listings) if known.id == id), None)
        copies = {} if known is None else known.copies
        tiers = sorted(copies, key=lambda tier: copies[tier].damage is not None)
        try:
            if known is None:
                raise IntegrityError(f"{id} is nowhere here")
            images, manifest = find_images(known, tiers, self._open_image, shard, tally)
            reader, buffer = ChunkReader(images, manifest, tally), memoryview(bytearray(2 * IMAGE))
            chunks = [bytes(reader.read(i, buffer)) for i in range(manifest.chunk_count)]
        except PASSABLE as error:
            self.world.trace.append(f"rank {self.number} cannot read {shard} of {id}: {error}")
            return False
        assert b"".join(chunks) == image_of(id, shard.rank), f"{id} is restored as another one"
        if shard == self.shard:
            self._read_whole = tuple(tier for tier, read in tally.bytes.items() if read == IMAGE)
        return True

    def _open_image(self, tier: str, id: CheckpointId, shard: Shard) -> Image:
        if tier != "host":
            return StoredImage(self.stores[tier], id, shard)
        memories = [rank.memory for rank in self.world.ranks if rank.node == self.node]
        for found, held in [held for memory in memories for held in images_of(memory)]:
            if (found, held.region.shard) == (id, shard):
                return RegionImage("host", held.region)
        raise IntegrityError(f"rank {shard.rank}'s part of {id} is not in memory here")

    def go_on_from(self, id: CheckpointId | None) -> None:
        """Go on from what was restored, of which this rank has read its part."""
        self.door.continue_from(id, attempt=self.attempt.number, read_whole=self._read_whole)
        for tier, of, error in self._found_damage:
            there = tier == "host" or self.stores[tier].is_committed(of)
            self.coordinator.found_damage(tier, of, str(error), repairable=there)

    def start(self, start: Start, held: tuple[Listing, ...]) -> None:
        """Begin to plan, by what all ranks have their parts of."""
        for store in self.stores.values():
            if self.owns(store.name):
                with suppress(BackendError, FencedError):
                    store.discard_unfinished(attempt=self.attempt)
        attempt = self.attempt
        self.runner = Worker(self.stores, lambda: attempt, buffer_bytes=2 * CHUNK)
        self.door = Door(
            rules=self.world.rules,
            stores=self.stores,
            memory=self.memory,
            images=images_of(self.memory),
            listings=self.listings,
            held=held,
            submit=self.tasks.append,
            now_s=self.world.now_s,
            wall_s=self.wall_s,
            max_wait_s=self.world.max_wait_s,
            when_full=self.world.when_full,
            start=start,
            message_tree=self.world.network.message_trees[self.number],
            shared=self.world.shared,
        )
        self.coordinator = self.door.planner
        self.world.lives.append(self.door.events)
        self._listen()
        self.door.start()

    @property
    def wall_s(self) -> float:
        """What the wall clock of its node shows; it may be wrong."""
        return self.world.now_s + self.world.wall_ahead_s.get(self.node, 0.0)

    def _listen(self) -> None:
        message_tree, post = self.world.network.message_trees[self.number], self.door.post
        listeners: dict[str | int, Callable[[RankMessage], None]] = {}
        self.listeners = listeners  # a zombie's are not those of the process in its place

        def hear(news: RankMessage) -> None:
            is_root = self.number == 0 and message_tree is self.world.network.message_trees[0]
            if is_root and isinstance(news, DecisionAnnounced):
                self.world.said(news.topic, news.body)
            listeners.get(news.topic[0], post)(news)

        message_tree.on_message = hear

    def die(self, *, memory: bool) -> None:
        """Threads, tasks and unsealed memory are gone; with ``memory``, all of it, but for who lives on there."""
        self.tasks, self._found_damage = [], []
        if memory:
            self.memory = FakeMemory(self.memory.capacity_bytes // IMAGE)
        for region in list(self.memory.regions):
            if not region.sealed:
                self.memory.regions.remove(region)

    # Saving --------------------------------------------------------------------------------------

    def _line(self, step: int) -> Lineage:
        self.ordinal = max(self.ordinal, self.door.ledger.least_ordinal) + 1
        return Lineage(
            run="run",
            checkpoint=CheckpointId(step, self.world.attempt.number),
            attempt_id=self.world.attempt.id,
            ordinal=self.ordinal,
            started_from=self.world.started_from,
        )

    def ask(self, step: int) -> list[Any]:
        """Ask for room; the answer (region, error) is appended once there is one."""
        answer = self.door.ask_for_memory(
            CheckpointId(step, self.world.attempt.number),
            image_bytes=IMAGE,
            deadline_s=self.world.now_s + self.world.max_wait_s,
        )
        self.step()
        return answer

    def _handle(self, line: Lineage) -> tuple[SaveHandle, tuple[str, ...]]:
        owed = tiers_owed(self.world.rules, line.ordinal)
        tiers = tuple(tier for tier in owed if tier in self.stores)
        handle = SaveHandle(
            line.checkpoint, tiers, in_memory="host", clock=lambda: self.world.now_s
        )
        self.handles[line.checkpoint] = handle
        return handle, tiers

    def skip(
        self, step: int, error: BaseException, outcome: SaveOutcome = SaveOutcome.SKIPPED
    ) -> SaveHandle:
        """A save that was called ends before its capture begins."""
        line = self._line(step)
        handle, _ = self._handle(line)
        handle.on_given_up(outcome, error)
        self.door.post(SaveGivenUp(id=line.checkpoint, error=error, outcome=outcome))
        self.step()
        return handle

    def leave_out(self, step: int, error: BaseException) -> None:
        """The others save a step that this rank has passed."""
        id = CheckpointId(step, self.world.attempt.number)
        if not any(other > id for other in self.handles):
            self._line(step)  # it has its place in this rank's line too
        self.door.post(SaveGivenUp(id=id, error=error, outcome=SaveOutcome.FAILED))
        self.step()

    def begin(self, step: int, region: FakeRegion) -> Snapshot:
        line = self._line(step)
        handle, tiers = self._handle(line)
        table = table_of(line.checkpoint, self.shard)
        snapshot = Snapshot(
            lineage=line,
            shard=self.shard,
            image_plan=replace(CUT, structure=sha256(table), pieces=table),
            region=region,
            handle=handle,
            copier=None,  # type: ignore[arg-type]
            wall_time_s=self.wall_s,
            node=str(self.node),
            share=self.world.share(line.checkpoint, self.number),
        )
        region.image[:] = b"\x55" * IMAGE  # above the watermark nothing is what it will be
        self.door.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
        self.step()
        return snapshot

    def advance(self, snapshot: Snapshot, final: int) -> None:
        """Let the watermark rise; at the end the image is sealed."""
        end = CUT.chunk_range(final - 1)[1] if final else 0
        snapshot.region.image[:end] = image_of(snapshot.id, self.number)[:end]
        self.door.post(CaptureAdvanced(id=snapshot.id, final_chunks=final))
        if final == CUT.chunk_count:
            self._seal(snapshot)
        self.step()

    def _seal(self, snapshot: Snapshot) -> None:
        own = CheckpointId(10 * snapshot.id.step + self.number, snapshot.id.attempt)
        # each rank measures something else; rank 0's counts
        manifest, commit = make_records(snapshot, measured=own)
        if snapshot.share is None:
            snapshot.region.seal(manifest=manifest, commit=commit)
            snapshot.handle.on_captured()
        self.door.post(CaptureSealed(id=snapshot.id))

    def fail_capture(self, snapshot: Snapshot, error: BaseException) -> None:
        self.door.post(CaptureFailed(id=snapshot.id, error=error, region=snapshot.region))
        self.step()

    def save(self, step: int) -> SaveHandle:
        """Save one step wholly into memory; memory must have room."""
        region, error = self.ask(step)
        assert error is None, error
        snapshot = self.begin(step, region)
        self.advance(snapshot, CUT.chunk_count)
        return snapshot.handle

    def order(self, kind: CommandKind, id: CheckpointId) -> list[Answer]:
        """Give an order; its answer is appended once there is one."""
        answer: list[Answer] = []
        self.door.command(kind, id, answer.append)
        self.step()
        return answer

    # Driving -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.next_s = self.door.step(self.world.now_s)

    @property
    def is_told(self) -> bool:
        """Something has come that its planner has not taken."""
        return self.door.is_told

    def run_one(self, draw: random.Random) -> bool:
        """Carry out one waiting task; False when none waits."""
        if not self.tasks:
            return False
        self.run(self.tasks[draw.randrange(len(self.tasks))])
        return True

    def run(self, task: Task) -> None:
        """Carry out a waiting task."""
        self.tasks.remove(task)
        outcome = self.runner.run(task)
        what = f"rank {self.number}: {type(task).__name__} {getattr(task, 'id', '')}"
        self.world.trace.append(f"{what} on {task.tier}: {outcome.error or 'done'}")
        self.world.ran(self, task)
        self.door.post(outcome)
        self.step()

    # Looking -------------------------------------------------------------------------------------

    def sealed(self) -> set[CheckpointId]:
        """What lies sealed in this rank's memory."""
        return {id for id, _ in images_of(self.memory)}

    def committed(self, tier: str) -> set[CheckpointId]:
        """What this rank's planner says is committed on a tier."""
        return self.door.whole_on(tier)
