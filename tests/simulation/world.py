"""A run in miniature: the production planner, policies, tiers and task runner over memory backends, driven by a virtual
clock on one thread. Tasks are carried out when the test says so, in an order that a seed decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

from tests.memory_backend import MemoryBackend
from tests.rules import retained
from tests.simulation.door import Answer, Door, Worker
from tests.simulation.wants import metrics_of, tags_of
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.snapshot import (
    CaptureAdvanced,
    CaptureBegun,
    CaptureFailed,
    CaptureSealed,
    Snapshot,
)
from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.copies.images import Image, StoredImage, checked_manifest, unpacked
from tierfall.core.flush.tasks import CommandKind, Task
from tierfall.core.format.catalog import FoundCopy, Listing, next_attempt
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced, sha256
from tierfall.core.format.records import (
    Attempt,
    Commit,
    ImagePlan,
    Lineage,
    NamedFile,
    parse_commit,
    parse_manifest,
)
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import KeyExistsError, UnreachableError
from tierfall.core.types.events import Event
from tierfall.core.types.values import (
    CheckpointId,
    Codec,
    CopyState,
    Shard,
    TierKind,
    WhenFull,
    survives,
)
from tierfall.core.types.view import TierRules
from tierfall.policies.flush import tiers_owed
from tierfall.setup.tiers import make_durable
from tierfall.tiers.image_writer import Packing
from tierfall.tiers.stored import StoredTier

SHARD = Shard(0, 1)
DATA_START = 4096
CHUNK = 4096
IMAGE = DATA_START + 3 * CHUNK - 100
CUT = ImagePlan(
    image_bytes=IMAGE,
    data_start=DATA_START,
    chunk_bytes=CHUNK,
    structure="s",
    pieces=Spliced(b"[]"),
)
PART = 4096
NO_CODECS: Mapping[str, Codec] = {}


def packing(codec: Codec | None) -> Packing | None:
    if codec in (None, Codec.NONE):
        return None
    return Packing(codec, level=1, chunk_bytes=CHUNK, parallel=2, part_bytes=PART)


def read_image(store: StoredTier, commit: Commit, shard: Shard = SHARD) -> bytes:
    """Read a whole image from a tier, chunk by chunk, each held against its digest."""
    image: Image = StoredImage(store, commit.lineage.checkpoint, shard)
    manifest = checked_manifest(image, commit, shard)
    image = unpacked(image, commit, manifest)
    data = bytearray()
    for index in range(manifest.chunk_count):
        view = image.read(manifest, index, memoryview(bytearray(frame_bytes_max(IMAGE))))
        assert chunk_digest(view) == manifest.digests[index], f"wrong bytes on {store.name}"
        data += view
    return bytes(data)


@lru_cache(maxsize=64)
def _image(id: str) -> bytes:
    return random.Random(id).randbytes(IMAGE)


def make_records(
    snapshot: Snapshot, *, measured: CheckpointId, not_finite: tuple[str, ...] = ()
) -> tuple[bytes, bytes]:
    """Make the manifest and the commit record of an image that is whole, with the metrics and tags of ``measured``."""
    ranges = [CUT.chunk_range(index) for index in range(CUT.chunk_count)]
    shard, image = snapshot.shard, snapshot.region.image
    digests = [chunk_digest(image[start:end]) for start, end in ranges]
    snapshot.manifest = snapshot.image_plan.manifest(snapshot.lineage, shard, digests)
    data = snapshot.manifest.encode()
    snapshot.commit = Commit(
        lineage=snapshot.lineage,
        world_size=shard.world_size,
        files=(
            NamedFile(name=keys.shard_name(shard), bytes=IMAGE, digest=None),
            NamedFile(name=keys.manifest_name(shard), bytes=len(data), digest=sha256(data)),
        ),
        nodes=(snapshot.node,),
        wall_time_s=snapshot.wall_time_s,
        metrics=metrics_of(measured),
        tags=tags_of(measured),
        not_finite=not_finite,
    )
    return data, snapshot.commit.encode()


class CommitReader:
    """Reads each commit record once: a published object never changes."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[object, Commit]] = {}

    def read(self, data: Any) -> Commit:
        if id(data) not in self._read:
            self._read[id(data)] = (data, parse_commit(bytes(data), what="a commit record"))
        return self._read[id(data)][1]


@lru_cache(maxsize=64)
def commit_in_memory(data: bytes) -> Commit:
    """Read a commit record in memory, which a simulation looks at after each event."""
    return parse_commit(data, what="memory")


class FakeRegion:
    """Host memory for one image, without a file behind it."""

    def __init__(self, memory: FakeMemory, image_bytes: int, records_bytes: int) -> None:
        self._memory = memory
        self.bytes = image_bytes + records_bytes
        self.image = memoryview(bytearray(image_bytes))
        self.sealed = False
        self._records: tuple[bytes, bytes] = (b"", b"")
        self.on_peers = False

    def seal(self, *, manifest: bytes, commit: bytes) -> None:
        self._records = (manifest, commit)
        self.sealed = True

    def unseal(self) -> None:
        assert self.sealed
        self.sealed = False

    @property
    def image_bytes(self) -> int:
        return len(self.image)

    @property
    def shard(self) -> Shard:
        """Whose image it is."""
        return parse_manifest(self.manifest(), what="memory").shard

    def manifest(self) -> bytes:
        return self._records[0]

    def commit(self) -> bytes:
        return self._records[1]

    def note_on_peers(self) -> None:
        self.on_peers = True

    def release(self) -> None:
        """Give the memory back, as something that others write to at once: a reader without a lease would see it."""
        self.sealed = False
        if self in self._memory.regions:
            self._memory.regions.remove(self)
            self.image[:] = b"\xee" * len(self.image)


class FakeMemory:
    """A host tier of ``images`` places."""

    def __init__(self, images: int) -> None:
        self.capacity_bytes = images * IMAGE
        self.regions: list[FakeRegion] = []

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(region.bytes for region in self.regions)

    @property
    def largest_free_bytes(self) -> int:
        return self.free_bytes

    def take_spare(self) -> bool:
        return False

    def would_fit(
        self, *, image_bytes: int, records_bytes: int, without: Collection[object]
    ) -> bool:
        gone = sum(region.bytes for region in self.regions if region in without)
        return image_bytes + records_bytes <= self.free_bytes + gone

    def allocate(self, *, image_bytes: int, records_bytes: int) -> FakeRegion | None:
        if image_bytes + records_bytes > self.free_bytes:
            return None
        region = FakeRegion(self, image_bytes, records_bytes)
        self.regions.append(region)
        return region


def host_rules(when_full: WhenFull = WhenFull.WAIT) -> TierRules:
    return TierRules(
        name="host",
        kind=TierKind.HOST,
        survives=survives(TierKind.HOST, shared=False),
        when_full=when_full,
    )


def file_rules(
    name: str, *, shared: bool = False, retain_last: int | None = None, **members: Any
) -> TierRules:
    members.setdefault("retain", retained(retain_last))
    return TierRules(
        name=name,
        kind=TierKind.FILE,
        survives=survives(TierKind.FILE, shared=shared),
        **members,
    )


def images_of(memory: FakeMemory) -> list[tuple[CheckpointId, Any]]:
    """The sealed images in memory, as tiers.host has them."""
    commits = [(commit_in_memory(x.commit()), x) for x in memory.regions if x.sealed]
    return [
        (x.lineage.checkpoint, SimpleNamespace(commit=x, region=region)) for x, region in commits
    ]


def found_in(region: FakeRegion) -> FoundCopy:
    """What a listing says of a sealed image in memory."""
    commit = commit_in_memory(region.commit())
    return FoundCopy(
        id=commit.lineage.checkpoint,
        state=CopyState.SEALED,
        bytes=IMAGE,
        commit=commit,
        on_peers=region.on_peers,
    )


def reads_anew(store: StoredTier) -> StoredTier:
    """No reading of a list is young: between two tasks any time may have passed."""
    read = store.decided.read
    store.decided.read = lambda **young: read()
    return store


def decided_on(disks: Iterable[MemoryBackend]) -> DecidedList:
    """What is decided by the lists on these disks together."""
    prefix = f"run/{keys.DECIDED_FOLDER}/"
    return DecidedList.parse(
        key.removeprefix(prefix)
        for disk in disks
        for key in disk._objects
        if key.startswith(prefix)
    )


def attempt_of(number: int, begun: int) -> Attempt:
    """The attempt that a run's start number ``begun`` takes."""
    id = f"{number:016x}{begun:016x}"  # another one's may have the same number
    return Attempt(run="run", number=number, id=id, node="n", pid=1, wall_time_s=0.0)


class World:
    """One run over several starts. What lies in ``disks`` and ``memory`` survives ``crash``."""

    def __init__(
        self,
        rules: Iterable[TierRules],
        *,
        memory_images: int = 3,
        seed: int = 0,
        max_wait_s: float = 60.0,
        when_full: WhenFull = WhenFull.WAIT,
        wrap: Callable[[str, Backend], Backend] = lambda name, inner: inner,
        codecs: Mapping[str, Codec] = NO_CODECS,
        run_bytes_min: int = 0,
    ) -> None:
        """``codecs`` says which tiers pack; ``run_bytes_min`` is how long a write is at least to those that do not."""
        self.rules = (host_rules(when_full), *rules)
        self.memory = FakeMemory(memory_images)
        self.disks = {r.name: MemoryBackend(place=r.name) for r in self.rules[1:]}
        self._backends = {name: wrap(name, disk) for name, disk in self.disks.items()}
        self._begun = 0
        self.blind: set[str] = set()
        """The ids of the attempts that began without a look at some tier."""
        self.run_bytes_min = run_bytes_min
        self.codecs = codecs
        self.stores = self._open_stores()
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.wall_ahead_s = 0.0
        self.max_wait_s = max_wait_s
        self.when_full = when_full
        self.handles: dict[CheckpointId, SaveHandle] = {}
        self.started_from: CheckpointId | None = None
        self.ordinal = 0
        self.trace: list[str] = []
        self.sees: Callable[[Task], None] = lambda task: None
        self.lives: list[list[Event]] = []
        self.start()

    @property
    def wall_s(self) -> float:
        """What the wall clock of the process shows; it may be wrong."""
        return self.now_s + self.wall_ahead_s

    def _open_stores(self) -> dict[str, StoredTier]:
        return {name: self._open_store(name, backend) for name, backend in self._backends.items()}

    def _open_store(self, name: str, backend: Backend, **more: Any) -> StoredTier:
        codec = self.codecs.get(name)
        return reads_anew(
            StoredTier(name=name, run="run", backend=backend, packing=packing(codec), **more)
        )

    # Starts ------------------------------------------------------------------------------------------

    def start(self, *, unread: Iterable[str] = ()) -> None:
        """Open the run as a new attempt, adopting what memory and disks hold; ``unread`` tiers cannot be listed."""
        listings = self._look_at_all(unread)
        held = images_of(self.memory)
        in_memory = Listing(tier="host", copies=tuple(found_in(i.region) for _, i in held))
        everything = (in_memory, *listings)
        self._take_number(next_attempt(everything))
        answered = [self.stores[x.tier] for x in listings if x.error is None]
        self._leave_attempt(answered)
        if len(answered) < len(listings):
            self.blind.add(self.attempt.id)
        for store in answered:
            store.discard_unfinished(attempt=self.attempt)
        self._attempt_taken()
        tasks: list[Task] = []  # a zombie's go on to come here, once another process has its own
        self.tasks = tasks
        self.runner = Worker(self.stores, lambda: self.attempt, buffer_bytes=2 * CHUNK)
        self.door = Door(
            rules=self.rules,
            stores=self.stores,
            memory=self.memory,
            images=held,
            listings=listings,
            held=everything,
            submit=lambda task: self._take(task) if tasks is self.tasks else tasks.append(task),
            now_s=self.now_s,
            wall_s=self.wall_s,
            max_wait_s=self.max_wait_s,
            when_full=self.when_full,
            run_bytes_min=self.run_bytes_min,
            set_pace=self.set_pace,
        )
        self.coordinator = self.door.planner
        self.lives.append(self.door.events)
        self.door.start()

    def _look_at_all(self, unread: Iterable[str]) -> tuple[Listing, ...]:
        return tuple(
            Listing(tier=store.name, error=UnreachableError("on purpose"))
            if store.name in unread
            else make_durable(store, store.list())
            for store in self.stores.values()
        )

    def _take_number(self, number: int) -> None:
        self._begun += 1
        self.attempt = attempt_of(number, self._begun)

    def _leave_attempt(self, stores: Collection[StoredTier]) -> None:
        """Leave the attempt's record on these tiers, with a number above where one of them has another's."""
        for store in stores:
            try:
                store.fence.create(self.attempt)
            except UnreachableError:
                continue  # it gets it before its first commit
            except KeyExistsError:
                self._take_number(self.attempt.number + 1)
                self._leave_attempt(stores)
                return

    def _attempt_taken(self) -> None:
        """A start has left its record wherever it could."""

    def _take(self, task: Task) -> None:
        self.tasks.append(task)
        self.sees(task)

    def set_pace(self, tier: str, bytes_per_s: float | None) -> None:
        """Nothing here takes time."""

    def take_other_memory(self) -> None:
        """The next start finds the memory of another machine, which is empty."""
        self.memory = FakeMemory(self.memory.capacity_bytes // IMAGE)

    def take_new_attempt(self) -> None:
        """Go on as a line of its own, as a restore after a save does."""
        self._take_number(self.attempt.number + 1)
        self._leave_attempt(self.stores.values())

    def crash(self) -> None:
        """End the process: threads, tasks and unsealed memory are gone."""
        for region in list(self.memory.regions):
            if not region.sealed:
                self.memory.regions.remove(region)
        self.tasks = []
        self.stores = self._open_stores()

    def rules_of(self, tier: str) -> TierRules:
        """What a tier was asked for."""
        return next(rules for rules in self.rules if rules.name == tier)

    # Saving ------------------------------------------------------------------------------------------

    def image(self, id: CheckpointId) -> bytes:
        """The bytes that checkpoint ``id`` has: a function of its identity alone."""
        return _image(str(id))

    def ask_for_region(
        self, step: int, *, image_bytes: int = IMAGE, records_bytes: int = 0
    ) -> list[Any]:
        """Ask to be admitted; the answer (region, error) is appended once there is one."""
        answer = self.door.ask_for_memory(
            CheckpointId(step, self.attempt.number),
            image_bytes=image_bytes,
            records_bytes=records_bytes,
            deadline_s=self.now_s + self.max_wait_s,
        )
        self.step()
        return answer

    def begin(self, step: int, region: FakeRegion) -> Snapshot:
        """Begin a capture into a region."""
        id = CheckpointId(step, self.attempt.number)
        self.ordinal += 1
        line = Lineage(
            run="run",
            checkpoint=id,
            attempt_id=self.attempt.id,
            ordinal=self.ordinal,
            started_from=self.started_from,
        )
        owed = tiers_owed(self.rules, self.ordinal)
        tiers = tuple(name for name in owed if name in self.stores)
        handle = SaveHandle(id, tiers, in_memory="host", clock=lambda: self.now_s)
        self.handles[id] = handle
        snapshot = Snapshot(
            lineage=line,
            shard=SHARD,
            image_plan=CUT,
            region=region,
            handle=handle,
            copier=None,  # type: ignore[arg-type]
            wall_time_s=self.now_s,
            node="n",
        )
        region.image[:] = self.image(id)
        self.door.post(CaptureBegun(snapshot=snapshot, tiers=tiers))
        return snapshot

    def advance(self, snapshot: Snapshot, final_chunks: int) -> None:
        self.door.post(CaptureAdvanced(id=snapshot.id, final_chunks=final_chunks))

    def seal(self, snapshot: Snapshot) -> None:
        """Finish a capture: digests, manifest, commit record, seal."""
        bad = ("w",) if snapshot.lineage.ordinal // 3 % 3 == 2 else ()
        manifest, commit = make_records(snapshot, measured=snapshot.id, not_finite=bad)
        snapshot.region.seal(manifest=manifest, commit=commit)
        snapshot.handle.on_captured()
        self.advance(snapshot, CUT.chunk_count)
        self.door.post(CaptureSealed(id=snapshot.id))

    def fail_capture(self, snapshot: Snapshot, error: BaseException) -> None:
        region = snapshot.region
        self.door.post(CaptureFailed(id=snapshot.id, error=error, region=region))

    def save(self, step: int) -> SaveHandle:
        """Save one step wholly into memory; memory must have room."""
        region, error = self.ask_for_region(step)
        assert error is None, error
        snapshot = self.begin(step, region)
        self.seal(snapshot)
        self.step()
        return snapshot.handle

    def save_all(self, *steps: int) -> None:
        """Save these steps, each until nothing is left to be done."""
        for step in steps:
            self.save(step)
            self.settle()

    # Driving -----------------------------------------------------------------------------------------

    def step(self) -> float | None:
        while True:
            next_s = self.door.step(self.now_s)
            if not self.door.is_told:
                return next_s

    def run_one(self) -> bool:
        """Carry out one waiting task, chosen by the seed; False when none waits."""
        if not self.tasks:
            return False
        self.run(self.tasks[self.random.randrange(len(self.tasks))])
        return True

    def run(self, task: Task) -> None:
        """Carry out a waiting task."""
        self.tasks.remove(task)
        outcome = self.runner.run(task)
        what = f"{type(task).__name__} {getattr(task, 'id', '')} on {task.tier}"
        self.trace.append(f"{what}: {outcome.error or 'done'}")
        self.door.post(outcome)
        self.step()

    def run_all(self) -> None:
        """Carry out what waits, and what comes of that, while no time passes."""
        while self.run_one():
            continue

    def settle(self, *, limit_s: float = 1000.0) -> None:
        """Carry out everything, letting time pass where the planner waits for it."""
        until = self.now_s + limit_s
        while True:
            next_s = self.step()
            self.run_all()
            next_s = self.step()
            if self.tasks:
                continue
            if next_s is None or next_s > until:
                return
            self.now_s = max(self.now_s, next_s)

    def order(self, kind: CommandKind, id: CheckpointId) -> Answer:
        answer: list[Answer] = []
        self.door.command(kind, id, answer.append)
        self.settle()
        assert answer, f"{kind} of {id} was not answered"
        return answer[0]

    # Looking -----------------------------------------------------------------------------------------

    def steps_on(self, tier: str) -> list[int]:
        """Steps committed on a stored tier, as a fresh look at it finds them."""
        return [copy.id.step for copy in self.stores[tier].list().copies]

    def check(self, tier: str) -> None:
        """Every committed copy on a tier has the right bytes, and nothing else is left lying there."""
        listing = self.stores[tier].list()
        assert listing.error is None
        for copy in listing.copies:
            assert copy.damage is None
            assert copy.commit is not None
            assert read_image(self.stores[tier], copy.commit) == self.image(copy.id)


class Process(Protocol):
    """What lives until its machine is lost: a run of one rank, or one rank of several."""

    attempt: Attempt
    tasks: list[Task]
    runner: Worker
    door: Door


class Zombie:
    """A process of a run that was taken for lost, and lives. It reaches the tiers of ``shared``; its node's own disks
    hang, and what it had begun there is never done."""

    def __init__(self, process: Process, shared: Collection[str]) -> None:
        self._door, self._tasks, self._runner = process.door, process.tasks, process.runner
        self._runner.keep(process.attempt)
        self._shared = shared
        self.number = process.attempt.number
        self.name = f"zombie {self.number}"

    def go_on(self, draw: random.Random, now_s: float, blind: Collection[str] = ()) -> list[str]:
        """Do some of what it has to do, and say what became of it; nothing on the tiers ``blind``."""
        output = []
        for _ in range(draw.randint(1, 6)):
            self._door.step(now_s)
            able = [t for t in self._tasks if t.tier in self._shared and t.tier not in blind]
            if not able:
                break
            task = draw.choice(able)
            self._tasks.remove(task)
            outcome = self._runner.run(task)
            what = f"{type(task).__name__} {getattr(task, 'id', '')} on {task.tier}"
            output.append(f"{self.name}: {what}: {outcome.error or 'done'}")
            self._door.post(outcome)
        self._door.step(now_s)
        return output


Place = tuple[str, int]
"""A tier, and the node whose disk it is."""


def objects_on(disks: Mapping[Place, MemoryBackend]) -> dict[tuple[Place, str], object]:
    """All that lies on these disks."""
    return {
        (place, key): data for place, disk in disks.items() for key, data in disk._objects.items()
    }


def newest_attempt(disks: Iterable[MemoryBackend]) -> int:
    """The newest attempt of which any of these disks has a record; 0 where none has."""
    found = [key for disk in disks for key in disk._objects]
    numbers = (keys.parse_attempt(key.removeprefix("run/attempts/")) for key in found)
    return max((number for number in numbers if number), default=0)


def start_in(key: str) -> tuple[int, str, int] | None:
    """What an object's key says of how an attempt began that has committed something: its number, its id and the step
    from which it went on, or -1; None where it says nothing of that."""
    folder, _, name = key.removeprefix("run/").partition("/")
    began = keys.parse_start(name) if folder == keys.LINEAGE_FOLDER else None
    return began and (began.attempt, began.attempt_id, began.step)


def abandoned(
    known: Mapping[CheckpointId, Commit], starts: Iterable[tuple[int, int]]
) -> set[CheckpointId]:
    """The rule in its plainest form: some later attempt started below this step, as its checkpoints say, or what its
    tiers keep of it, which ``starts`` are, when those are gone."""
    starts = set(starts)
    for commit in known.values():
        start = commit.lineage.started_from
        starts.add((commit.lineage.checkpoint.attempt, -1 if start is None else start.step))
    return {
        id
        for id in known
        if any(attempt > id.attempt and id.step > step for attempt, step in starts)
    }


def image_key(commit: Commit, shard: Shard = SHARD) -> str:
    """The key of a shard's image, as a commit record names it."""
    file = image_file(commit, shard)
    assert file is not None
    return keys.step_prefix("run", commit.lineage.checkpoint) + file.file.name


def flip_bit(disk: MemoryBackend, key: str, draw: random.Random) -> object:
    """Change one bit of an object, and return what lies there now."""
    kind, data = type(disk._objects[key]), bytearray(disk._objects[key])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    disk._objects[key] = kind(data)
    return disk._objects[key]
