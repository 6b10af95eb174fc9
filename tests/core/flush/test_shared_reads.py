"""One read for several writers: which share it, which read for themselves, and none waits without end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.flush.tasks import CopyRun, CopySource
from tierfall.core.flush.worker import SharedReads
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Lineage, Manifest
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.values import CheckpointId, Shard

PATIENCE_S = 20.0
CHUNK = 4096
CHUNKS = 8
IMAGE = random.Random(7).randbytes(CHUNKS * CHUNK)
LONGEST = frame_bytes_max(3 * CHUNK)


def manifest_of(image: bytes) -> Manifest:
    chunks = (image[at : at + CHUNK] for at in range(0, len(image), CHUNK))
    line = Lineage(
        run="run",
        checkpoint=CheckpointId(1, 1),
        attempt_id="1" * 32,
        ordinal=1,
        started_from=None,
    )
    return Manifest(
        lineage=line,
        shard=Shard(0, 1),
        image_bytes=len(image),
        data_start=CHUNK,
        chunk_bytes=CHUNK,
        digests=tuple(chunk_digest(memoryview(chunk)) for chunk in chunks),
        structure="s",
        pieces=Spliced(b"[]"),
    )


def run_to(tier: str, first: int = 0, stop: int = 1) -> CopyRun:
    return CopyRun(
        tier=tier,
        id=CheckpointId(1, 1),
        shard=Shard(0, 1),
        number=first,
        first=first,
        stop=stop,
        start=first * CHUNK,
        end=stop * CHUNK,
        source=CopySource(tier="disk"),
        manifest=manifest_of(IMAGE),
        writer=None,  # type: ignore[arg-type]
    )


class Task:
    """A function on a thread of its own: one that never ends fails its test, and holds up nothing else."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(function, args), daemon=True).start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            self._future.set_exception(error)

    def result(self) -> Any:
        return self._future.result(PATIENCE_S)


class Tiers:
    """Two tiers or more with ``count`` buffers each; every read of the source is counted."""

    def __init__(self, *names: str, count: int = 1, wait_s: float = PATIENCE_S) -> None:
        self.pools = {name: BufferPool(bytes=LONGEST, count=count) for name in names}
        self.count = count
        self.shared = SharedReads(self.pools, wait_s=wait_s)
        self.reads: list[CopyRun] = []
        self.before_read: Callable[[CopyRun], None] = lambda run: None

    def bring(self, run: CopyRun, write: Callable[[memoryview], None] = lambda view: None) -> bytes:
        """Do as a worker does; returns the bytes as they were after the write."""

        def read(buffer: memoryview) -> None:
            self.reads.append(run)
            self.before_read(run)
            buffer[: run.end - run.start] = IMAGE[run.start : run.end]

        with self.shared.lend(run, read) as view:
            write(view)
            return bytes(view)

    def waiting(self) -> int:
        """How many take part in a run that somebody else has in hand."""
        return sum(len(held.spare) for held in self.shared._ranges)

    def check_buffers(self) -> None:
        """Every pool has all its buffers again, and no two have the same one."""
        lent = []
        for name, pool in self.pools.items():
            for _ in range(self.count):
                lent.append(Task(pool.borrow, 1).result().view)  # a pool that lost one would wait
            assert not pool._free, f"{name} has more buffers than it came with"
        for number, buffer in enumerate(lent):
            buffer[0] = number
        assert [buffer[0] for buffer in lent] == list(range(len(lent)))


def wants(run: CopyRun) -> bytes:
    return IMAGE[run.start : run.end]


class Worker:
    """A thread that brings a run, and stays in its write until it is let go."""

    def __init__(self, tiers: Tiers, run: CopyRun) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        self._task = Task(tiers.bring, run, self._write)

    def _write(self, view: memoryview) -> None:
        self.writing.set()
        assert self.go_on.wait(PATIENCE_S)

    def started(self) -> Worker:
        assert self.writing.wait(PATIENCE_S)
        return self

    def end(self) -> bytes:
        self.go_on.set()
        return self._task.result()


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_tier_that_hangs_in_a_write_keeps_no_buffer_of_the_other(slow: str) -> None:
    """Whoever read it: with one buffer each, the fast one brings the whole image meanwhile."""
    tiers = Tiers("a", "b")
    workers = {tier: Worker(tiers, run_to(tier)).started() for tier in ("a", "b")}
    fast = "b" if slow == "a" else "a"
    assert workers[fast].end() == wants(run_to(fast))
    for index in range(1, CHUNKS):
        run = run_to(fast, index, index + 1)
        assert Task(tiers.bring, run).result() == wants(run)
    assert workers[slow].end() == wants(run_to(slow)), "its bytes changed while it wrote them"
    tiers.check_buffers()


def test_a_hanging_read_is_waited_for_no_longer_than_was_reported() -> None:
    tiers = Tiers("a", "b", wait_s=0.05)
    hanging, go_on = threading.Event(), threading.Event()

    def hang(run: CopyRun) -> None:
        if run.tier == "a":
            hanging.set()
            assert go_on.wait(PATIENCE_S)

    tiers.before_read = hang
    a = Worker(tiers, run_to("a"))
    assert hanging.wait(PATIENCE_S)
    b = Worker(tiers, run_to("b")).started()
    assert b.end() == wants(run_to("b"))
    go_on.set()
    assert a.started().end() == wants(run_to("a"))
    assert [run.tier for run in tiers.reads] == ["a", "b"]
    tiers.check_buffers()


def other_digests(run: CopyRun) -> CopyRun:
    assert run.manifest is not None
    return replace(run, manifest=manifest_of(b"x" + IMAGE[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda run: replace(run, source=CopySource(tier="store")),
        lambda run: replace(run, id=CheckpointId(2, 1)),
        lambda run: replace(run, shard=Shard(1, 2)),
        lambda run: replace(run, first=1, stop=2, start=CHUNK, end=2 * CHUNK),
        lambda run: replace(run, stop=2, end=2 * CHUNK),
        other_digests,
    ],
    ids=["source", "checkpoint", "shard", "chunk", "more-chunks", "digests"],
)
def test_other_bytes_are_read(change: Callable[[CopyRun], CopyRun]) -> None:
    tiers = Tiers("a", "b")
    a = Worker(tiers, run_to("a")).started()
    run = change(run_to("b"))
    assert tiers.bring(run) == wants(run)
    assert len(tiers.reads) == 2
    assert a.end() == wants(run_to("a"))
    tiers.check_buffers()


@pytest.mark.parametrize(("seed", "wait_s"), [(0, PATIENCE_S), (1, 0.0)])
def test_many_at_once_get_their_bytes_and_leave_every_buffer(seed: int, wait_s: float) -> None:
    tiers = Tiers("a", "b", "c", count=2, wait_s=wait_s)
    source = random.Random(seed)
    runs = []
    for _ in range(300):
        first = source.randrange(CHUNKS)
        runs.append(run_to(source.choice("abc"), first, source.randint(first + 1, CHUNKS)))
    broken = {id(run) for run in source.sample(runs, 60)}

    def fail(run: CopyRun) -> None:
        pause.wait(0.0002)
        if id(run) in broken:
            raise ZeroDivisionError

    tiers.before_read = fail

    def bring(run: CopyRun) -> None:
        try:
            assert tiers.bring(run, lambda view: pause.wait(0.0002) and None) == wants(run)
        except ZeroDivisionError:
            assert id(run) in broken

    def bring_all(share: list[CopyRun]) -> None:
        for run in share:
            bring(run)

    pause = threading.Event()
    bringing = [Task(bring_all, runs[at::6]) for at in range(6)]
    for task in bringing:
        task.result()
    assert len(tiers.reads) < len(runs), "nothing was shared"
    assert tiers.shared._ranges == []
    tiers.check_buffers()
