"""Several ranks of one run in miniature: each with the production coordinator, ledger, policies, tiers and task runner,
its own memory, the disk of its node and one disk that all see; their councils over a network that a seed delivers.

One thread and a virtual clock drive it all. Tasks, messages and coordinators go on when the test says so, in an order
that a seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from tests.core.ranks.network import Network
from tests.simulation.wants import metrics_of, tags_of
from tests.simulation.world import (
    CHUNK,
    DATA_START,
    IMAGE,
    CommitReader,
    FakeMemory,
    FakeRegion,
    found_in,
    host_rules,
    images_of,
    packing,
)
from tierfall.adopting import take_over
from tierfall.backends.faults import Fault, Faulty
from tierfall.backends.memory import MemoryBackend
from tierfall.core import names
from tierfall.core.buffers import BufferPool
from tierfall.core.capture.filling import chunk_digest
from tierfall.core.catalog import FoundCopy, Listing, merge
from tierfall.core.documents import Spliced, dumps, sha256
from tierfall.core.errors import RestoreError
from tierfall.core.handle import SaveHandle
from tierfall.core.ranks.council import Bodies, Topic
from tierfall.core.ranks.ranks import Announced, Gathered, Told
from tierfall.core.records import (
    Attempt,
    Commit,
    Line,
    Manifest,
    NamedFile,
    read_commit,
)
from tierfall.core.restore.agreeing import choose_together, complete, whole_on
from tierfall.core.restore.choosing import Request
from tierfall.core.restore.describing import describe, merge_ranks, unite
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.lane import LaneLimits
from tierfall.core.scheduler.ledger import Ledger
from tierfall.core.scheduler.runner import TaskRunner
from tierfall.core.scheduler.tasks import (
    Admission,
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    Order,
    PersonsOrder,
    SaveGivenUp,
    Task,
)
from tierfall.core.snapshot import Geometry, Snapshot
from tierfall.core.values import (
    CheckpointId,
    Codec,
    CopyState,
    SaveOutcome,
    Shard,
    WhenFull,
)
from tierfall.core.view import TierRules
from tierfall.inheriting import inherited
from tierfall.policies import bundle
from tierfall.starting import Start, held_by_all
from tierfall.tiers.stored import StoredTier

NODE_TIER = "nvme"
SHARED_TIER = "pfs"
ROUNDS_MAX = 20_000
"""No run that is left alone has so much to do: it goes round in a circle."""
CUT = Geometry(image_bytes=IMAGE, data_start=DATA_START, chunk_bytes=CHUNK)


class Troubled(Faulty):
    """What one rank sees of a disk: its own troubles come and go."""

    def strike(self, plan: Sequence[Fault]) -> None:
        """Have these faults from now on, and no others; what is open already has them too."""
        self._plan = tuple(plan)
        self._count = Faulty(self._inner, seed=0, plan=plan)._count


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
        self.troubles: dict[str, Troubled] = {}
        self.stores: dict[str, StoredTier] = {}
        self.tasks: list[Task] = []
        self.next_s: float | None = None
        self.ordinal = 0
        self.coordinator: Coordinator

    # A start, step by step -----------------------------------------------------------------------

    def open(self) -> tuple[Listing, ...]:
        """Look at all that this rank can see."""
        self.tasks = []
        self.troubles = {
            tier: Troubled(self.world.disk(tier, self.node), seed=self.number, plan=())
            for tier in self.world.stored
        }
        self.stores = {
            tier: StoredTier(
                name=tier,
                run="run",
                backend=trouble,
                packing=packing(self.world.codecs.get(tier)),
            )
            for tier, trouble in self.troubles.items()
        }
        return (self._in_memory(), *(store.list() for store in self.stores.values()))

    def _in_memory(self) -> Listing:
        found: dict[CheckpointId, dict[str, FoundCopy]] = {}
        for id, image in images_of(self.memory):
            copy = found_in(image.region)
            found.setdefault(id, {})[f"region {len(found.get(id, ()))}"] = copy
        return Listing(tier="host", copies=tuple(unite(copies)[0] for copies in found.values()))

    def start(self, start: Start, listings: tuple[Listing, ...], held: tuple[Listing, ...]) -> None:
        """Build the ledger of what all ranks have their parts of, and begin."""
        for store in self.stores.values():
            store.take_attempt(self.world.attempt)
        ledger = Ledger(self.world.rules, "host", shard=self.shard)
        ledger.load(merge(held), held)
        ledger.set_clock(now_s=self.world.now_s, wall_time_s=self.world.now_s)
        ledger.scattered = start.scattered
        ledger.deleted = start.deleted
        ledger.note_partial(x for x in listings if x.tier in start.seen)
        self.inheritance = take_over(ledger, images_of(self.memory), [], start.inherited)
        attempt = self.world.attempt
        self.runner = TaskRunner(
            self.stores,
            {name: BufferPool(bytes=2 * CHUNK, count=4) for name in self.stores},
            lambda: attempt,
        )
        self.coordinator = Coordinator(
            ledger=ledger,
            lanes={
                name: LaneLimits(parallel=2, budget_bytes=1 << 20, window=3 if store.packs else 0)
                for name, store in self.stores.items()
            },
            host=self.memory,
            policies=bundle,
            submit=self.tasks.append,
            max_wait_s=self.world.max_wait_s,
            when_full=self.world.when_full,
            council=self.world.network.councils[self.number],
            shared={tier: tier == SHARED_TIER for tier in self.world.stored},
        )
        self.coordinator.mind(self.inheritance)
        self._listen()
        self.coordinator.start()
        self.coordinator.ledger.go_on_from(self.world.started_from, attempt=attempt.number)

    def _listen(self) -> None:
        council, post = self.world.network.councils[self.number], self.coordinator.post

        def gathered(topic: Topic, bodies: Bodies) -> None:
            post(Gathered(topic=topic, bodies=bodies))

        def passed(topic: Topic, bodies: Bodies) -> None:
            post(Gathered(topic=topic, bodies=bodies, passed=True))

        def announced(topic: Topic, body: Any) -> None:
            if self.number == 0:
                self.world.said(topic, body)
            post(Announced(topic=topic, body=body))

        def told(topic: Topic, body: Any, rank: int) -> None:
            post(Told(topic=topic, body=body, rank=rank))

        council.on_gathered, council.on_passed = gathered, passed
        council.on_announced, council.on_told = announced, told

    def die(self, *, memory: bool) -> None:
        """Threads, tasks and unsealed memory are gone; with ``memory``, all of it."""
        self.tasks = []
        for region in list(self.memory.regions):
            if memory or not region.sealed:
                self.memory.regions.remove(region)

    # Saving --------------------------------------------------------------------------------------

    def _line(self, step: int) -> Line:
        self.ordinal = max(self.ordinal, self.coordinator.ledger.least_ordinal) + 1
        return Line(
            run="run",
            checkpoint=CheckpointId(step, self.world.attempt.number),
            attempt_id=self.world.attempt.id,
            ordinal=self.ordinal,
            started_from=self.world.started_from,
        )

    def ask(self, step: int) -> list[Any]:
        """Ask for room; the answer (region, error) is appended once there is one."""
        answer: list[Any] = []
        self.coordinator.post(
            Admission(
                id=CheckpointId(step, self.world.attempt.number),
                image_bytes=IMAGE,
                records_bytes=0,
                deadline_s=self.world.now_s + self.world.max_wait_s,
                answer=lambda region, error: answer.extend((region, error)),
            )
        )
        self.step()
        return answer

    def _handle(self, line: Line) -> tuple[SaveHandle, tuple[str, ...]]:
        tiers = bundle.tiers_owed(self.world.rules, line.ordinal)
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
        handle.tell_given_up(outcome, error)
        self.coordinator.post(SaveGivenUp(id=line.checkpoint, error=error, outcome=outcome))
        self.step()
        return handle

    def begin(self, step: int, region: FakeRegion) -> Snapshot:
        line = self._line(step)
        handle, tiers = self._handle(line)
        snapshot = Snapshot(
            line=line,
            shard=self.shard,
            geometry=CUT,
            structure=sha256(table_of(line.checkpoint, self.shard)),
            pieces=table_of(line.checkpoint, self.shard),
            region=region,
            handle=handle,
            filling=None,  # type: ignore[arg-type]
            wall_time_s=self.world.now_s,
            node=str(self.node),
        )
        region.image[:] = b"\x55" * IMAGE  # above the watermark nothing is what it will be
        self.coordinator.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
        self.step()
        return snapshot

    def advance(self, snapshot: Snapshot, final: int) -> None:
        """Let the watermark rise; at the end the image is sealed."""
        end = CUT.chunk_range(final - 1)[1] if final else 0
        snapshot.region.image[:end] = image_of(snapshot.id, self.number)[:end]
        self.coordinator.post(CaptureAdvanced(id=snapshot.id, final_chunks=final))
        if final == CUT.chunk_count:
            self._seal(snapshot)
        self.step()

    def _seal(self, snapshot: Snapshot) -> None:
        image = snapshot.region.image
        ranges = [CUT.chunk_range(index) for index in range(CUT.chunk_count)]
        snapshot.manifest = Manifest(
            line=snapshot.line,
            shard=self.shard,
            image_bytes=IMAGE,
            data_start=DATA_START,
            chunk_bytes=CHUNK,
            digests=tuple(chunk_digest(image[start:end]) for start, end in ranges),
            structure=snapshot.structure,
            pieces=snapshot.pieces,
        )
        data = snapshot.manifest.encode()
        manifest = names.manifest_name(self.shard)
        own = CheckpointId(10 * snapshot.id.step + self.number, snapshot.id.attempt)
        snapshot.commit = Commit(  # each rank measures something else; rank 0's counts
            line=snapshot.line,
            world_size=self.shard.world_size,
            files=(
                NamedFile(name=names.shard_name(self.shard), bytes=IMAGE, digest=None),
                NamedFile(name=manifest, bytes=len(data), digest=sha256(data)),
            ),
            nodes=(str(self.node),),
            wall_time_s=snapshot.wall_time_s,
            metrics=metrics_of(own),
            tags=tags_of(own),
        )
        snapshot.region.seal(manifest=data, commit=snapshot.commit.encode())
        snapshot.handle.tell_captured()
        self.coordinator.post(CaptureSealed(id=snapshot.id))

    def fail_capture(self, snapshot: Snapshot, error: BaseException) -> None:
        self.coordinator.post(CaptureFailed(id=snapshot.id, error=error, region=snapshot.region))
        self.step()

    def save(self, step: int) -> SaveHandle:
        """Save one step wholly into memory; memory must have room."""
        region, error = self.ask(step)
        assert error is None, error
        snapshot = self.begin(step, region)
        self.advance(snapshot, CUT.chunk_count)
        return snapshot.handle

    def order(self, kind: PersonsOrder, id: CheckpointId) -> list[dict[str, BaseException]]:
        """Give an order; its answer is appended once there is one."""
        answer: list[dict[str, BaseException]] = []
        order = Order(kind=kind, id=id, wall_time_s=self.world.now_s, answer=answer.append)
        self.coordinator.post(order)
        self.step()
        return answer

    # Driving -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.next_s = self.coordinator.step(self.world.now_s)

    @property
    def is_told(self) -> bool:
        """Something has come that its coordinator has not taken."""
        return not self.coordinator._arrived.empty()

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
        self.coordinator.post(outcome)
        self.step()

    # Looking -------------------------------------------------------------------------------------

    def sealed(self) -> set[CheckpointId]:
        """What lies sealed in this rank's memory."""
        return {copy.id for copy in self._in_memory().copies}

    def committed(self, tier: str) -> set[CheckpointId]:
        """What this rank's ledger says is committed on a tier."""
        entries = self.coordinator.ledger.entries.values()
        return {e.id for e in entries if e.state(tier) is CopyState.COMMITTED}


class Many:
    """One run of several ranks over several starts. ``node_of`` names the node of each rank."""

    def __init__(
        self,
        node_of: Sequence[int],
        rules: Iterable[TierRules],
        *,
        seed: int = 0,
        fan_out: int = 64,
        memory_images: int = 3,
        max_wait_s: float = 60.0,
        when_full: WhenFull = WhenFull.WAIT,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        """``rules`` are those of the tiers ``nvme``, which each node has for itself, and ``pfs``, which all see."""
        self.node_of = tuple(node_of)
        self.rules = (host_rules(when_full), *rules)
        self.stored = tuple(tier.name for tier in self.rules[1:])
        self.seed, self.fan_out = seed, fan_out
        self.codecs = codecs or {}
        self.max_wait_s, self.when_full = max_wait_s, when_full
        self.random = random.Random(f"many {seed}")
        self.now_s = 0.0
        self.trace: list[str] = []
        self.said: Callable[[Topic, Any], None] = lambda topic, body: None
        self.ran: Callable[[Rank, Task], None] = lambda rank, task: None
        self._disks: dict[tuple[str, int | None], MemoryBackend] = {}
        self._read = CommitReader().read
        self.starts = 0
        self.started_from: CheckpointId | None = None
        self.ranks = [Rank(self, number, memory_images) for number in range(len(self.node_of))]
        self.start()

    def disk(self, tier: str, node: int) -> MemoryBackend:
        key = (tier, None if tier == SHARED_TIER else node)
        return self._disks.setdefault(key, MemoryBackend(place=f"{tier} of node {node}"))

    def disks(self, tier: str) -> dict[int, MemoryBackend]:
        """The disks of a tier by node; the shared one under 0."""
        nodes = sorted(set(self.node_of)) if tier == NODE_TIER else [0]
        return {node: self.disk(tier, node) for node in nodes}

    # Starts --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the run on all ranks as one new attempt, and go on from the newest checkpoint that all can restore."""
        self.starts += 1
        self.network = Network(
            self.node_of, seed=self.seed + 1000 * self.starts, fan_out=self.fan_out
        )
        listings = {rank: rank.open() for rank in self.ranks}
        described = {
            rank.number: describe(listings[rank], mine=self._told_by(rank)) for rank in self.ranks
        }
        order = [rules.name for rules in self.rules]
        together = merge_ranks(described, order)
        found, _ = complete(together)
        known = {copy.id: copy.commit for listing in together for copy in listing.copies}
        numbers = [n for x in together for n in x.attempts] + [id.attempt for id in known]
        numbers += [n for listed in listings.values() for x in listed for n in x.attempts]
        self.attempt = _attempt(1 + max(numbers, default=0))
        start = Start(
            attempt=self.attempt,
            whole={
                x.tier: frozenset(c.id for c in x.copies if whole_on(x, c.id)) for x in together
            },
            complete=found,
            seen=frozenset(x.tier for x in together if x.error is None),
            first=not known,
            inherited=tuple(
                read_commit(text.encode(), what="inherited")
                for text in inherited(
                    together, described, host="host", world_size=len(self.node_of)
                )
            ),
            marks={x.tier: {c.id: c.marks for c in x.copies if c.marks} for x in together},
            deleted=frozenset(c.id for c in merge(together) if c.tombstoned and not c.pinned),
        )
        self.started_from = self._chosen(described, order)
        commit = known.get(self.started_from) if self.started_from else None
        self.trace.append(f"attempt {self.attempt.number} goes on from {self.started_from}")
        host = SimpleNamespace(host=SimpleNamespace(name="host"))
        for rank in self.ranks:
            session = SimpleNamespace(config=host, listings=listings[rank], ranks=rank)
            rank.ordinal = commit.line.ordinal if commit else 0
            rank.start(start, listings[rank], held_by_all(cast(Any, session), start))
        for rank in self.ranks:
            rank.step()

    def _chosen(
        self, described: Mapping[int, Mapping[str, Any]], order: Sequence[str]
    ) -> CheckpointId | None:
        try:
            chosen = choose_together(described, order, Request())["order"]
        except RestoreError as error:  # a person decides to begin anew
            self.trace.append(f"fresh: {error}")
            return None
        return CheckpointId(*chosen[0]) if chosen else None

    def _told_by(self, rank: Rank) -> tuple[str, ...]:
        topology = self.network.councils[rank.number].topology
        told = ["host"]
        told += [NODE_TIER] if topology.is_leader and NODE_TIER in self.stored else []
        told += [SHARED_TIER] if topology.is_root else []
        return tuple(told)

    def crash(self, *, nodes_lost: Iterable[int] = ()) -> None:
        """End every process at once; the nodes that are lost lose their memory too."""
        lost = set(nodes_lost)
        for rank in self.ranks:
            rank.die(memory=rank.node in lost)

    def renumber(self, draw: random.Random) -> None:
        """Let the ranks of each node find at the next start what others of it have left in memory."""
        for node in sorted(set(self.node_of)):
            there = [rank for rank in self.ranks if rank.node == node]
            memories = [rank.memory for rank in there]
            draw.shuffle(memories)
            for rank, memory in zip(there, memories, strict=True):
                rank.memory = memory

    # Driving -------------------------------------------------------------------------------------

    def step(self) -> None:
        for rank in self.ranks:
            rank.step()

    def hear(self) -> None:
        """Let every coordinator go on that was told something."""
        for rank in self.ranks:
            if rank.is_told:
                rank.step()

    def deliver(self, limit: int | None = None) -> None:
        self.network.deliver(limit)

    def settle(self, *, limit_s: float = 3000.0, after_each: Callable[[], None] = int) -> None:
        """Carry out everything, letting time pass where a coordinator waits for it."""
        until = self.now_s + limit_s
        for _ in range(ROUNDS_MAX):
            self.deliver(self.random.choice((1, 3, 10)))
            self.hear()
            busy = [rank for rank in self.ranks if rank.tasks]
            if busy:
                self.random.choice(busy).run_one(self.random)
            after_each()
            if busy or self.network.waiting:
                continue
            self.step()
            if self.network.waiting or any(rank.tasks or rank.is_told for rank in self.ranks):
                continue
            waits = [rank.next_s for rank in self.ranks if rank.next_s is not None]
            if not waits or min(waits) > until:
                return
            self.now_s = max(self.now_s, min(waits))
        raise AssertionError("it never comes to rest")

    # Looking -------------------------------------------------------------------------------------

    def records(self, tier: str, node: int) -> dict[CheckpointId, Commit]:
        """The commit records on one disk, as a look at its bytes finds them."""
        found = {}
        for key, data in self.disk(tier, node)._objects.items():
            folder, _, rest = key.removeprefix("run/").partition("/")
            id = names.parse_step_folder(folder)
            if id is not None and rest == names.COMMIT_NAME:
                found[id] = self._read(data)
        return found

    def committed(self, tier: str) -> set[CheckpointId]:
        """What is committed on every disk of a tier."""
        found = [set(self.records(tier, node)) for node in self.disks(tier)]
        return set.intersection(*found)


def _attempt(number: int) -> Attempt:
    attempt = Attempt(run="run", number=1, id="", node="n", pid=1, wall_time_s=0.0)
    return replace(attempt, number=number, id=f"{number:032x}")
