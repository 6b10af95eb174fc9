"""One rank in miniature: the production coordinator, ledger, policies, tiers and task runner, a memory of its own, and
what it can see of the disks. It lives in a ``Many``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.noted import Life
from tests.simulation.wants import metrics_of, tags_of
from tests.simulation.world import (
    CHUNK,
    DATA_START,
    IMAGE,
    FakeMemory,
    FakeRegion,
    found_in,
    images_of,
    packing,
)
from tierfall.backends.wrappers.faults import Fault, Faulty
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.capture.events import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    SaveGivenUp,
)
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import Snapshot
from tierfall.core.format.catalog import FoundCopy, Listing, merge
from tierfall.core.format.documents import Spliced, dumps, sha256
from tierfall.core.format.records import Commit, Geometry, Line, Manifest, NamedFile
from tierfall.core.ranks.message_tree import Bodies, Topic
from tierfall.core.ranks.ranks import Announced, Gathered, News, Told
from tierfall.core.restore.inventory import unite
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.executor import TaskRunner
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.scheduler.ledger.tasks import Admission, Order, PersonsOrder, Task
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome, Shard
from tierfall.policies import defaults
from tierfall.session.adopt import take_over
from tierfall.session.start import Start
from tierfall.tiers.stored import StoredTier

if TYPE_CHECKING:
    from tests.simulation.many import Many

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
        self.listeners: dict[str | int, Callable[[News], None]] = {}
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
        ledger.note_marks(start.marks)
        attempt = self.world.attempt
        self.runner = TaskRunner(
            self.stores,
            {name: BufferPool(bytes=2 * CHUNK, count=4) for name in self.stores},
            lambda: attempt,
        )
        life = Life()
        self.world.lives.append(life)
        self.coordinator = life.coordinator = Coordinator(
            ledger=ledger,
            lanes={
                name: LaneLimits(parallel=2, budget_bytes=1 << 20, window=3 if store.packs else 0)
                for name, store in self.stores.items()
            },
            host=self.memory,
            policies=defaults,
            submit=self.tasks.append,
            max_wait_s=self.world.max_wait_s,
            when_full=self.world.when_full,
            council=self.world.network.councils[self.number],
            shared=self.world.shared,
            notify=life.events.append,
        )
        self.coordinator.mind(self.inheritance)
        self._listen()
        self.coordinator.start()
        self.coordinator.ledger.go_on_from(self.world.started_from, attempt=attempt.number)

    def _listen(self) -> None:
        council = self.world.network.councils[self.number]
        self.listeners = {}

        def hear(news: News) -> None:
            self.listeners.get(news.topic[0], self.coordinator.post)(news)

        def gathered(topic: Topic, bodies: Bodies) -> None:
            hear(Gathered(topic=topic, bodies=bodies))

        def passed(topic: Topic, bodies: Bodies) -> None:
            hear(Gathered(topic=topic, bodies=bodies, passed=True))

        def announced(topic: Topic, body: Any) -> None:
            if self.number == 0:
                self.world.said(topic, body)
            hear(Announced(topic=topic, body=body))

        def told(topic: Topic, body: Any, rank: int) -> None:
            hear(Told(topic=topic, body=body, rank=rank))

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
        tiers = defaults.tiers_owed(self.world.rules, line.ordinal)
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

    def leave_out(self, step: int, error: BaseException) -> None:
        """The others save a step that this rank has passed."""
        id = CheckpointId(step, self.world.attempt.number)
        if not any(other > id for other in self.handles):
            self._line(step)  # it has its place in this rank's line too
        self.coordinator.post(SaveGivenUp(id=id, error=error, outcome=SaveOutcome.FAILED))
        self.step()

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
            share=self.world.share(line.checkpoint, self.number),
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
        manifest = keys.manifest_name(self.shard)
        own = CheckpointId(10 * snapshot.id.step + self.number, snapshot.id.attempt)
        snapshot.commit = Commit(  # each rank measures something else; rank 0's counts
            line=snapshot.line,
            world_size=self.shard.world_size,
            files=(
                NamedFile(name=keys.shard_name(self.shard), bytes=IMAGE, digest=None),
                NamedFile(name=manifest, bytes=len(data), digest=sha256(data)),
            ),
            nodes=(str(self.node),),
            wall_time_s=snapshot.wall_time_s,
            metrics=metrics_of(own),
            tags=tags_of(own),
        )
        if snapshot.share is None:
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
