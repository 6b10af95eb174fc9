"""Kills processes that work on an arena, and checks what they leave; ``test_arena_model.py`` runs it as a process.

A child works through a seeded script and writes a journal into a pipe: what it is about to do, and what it has done.
After its SIGKILL this process attaches the arena and compares it with the journal: what was done is there bit for bit,
what was begun is there whole or not at all, and the rest is free. The child is forked: this process runs no threads.

    arena_killer.py FOLDER points          kill at every store, reservation and rename of one script, one after another
    arena_killer.py FOLDER random COUNT    kill COUNT endless scripts after a random number of journal lines
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tierfall.core.types.errors import KeyNotFoundError
from tierfall.core.types.values import Shard
from tierfall.tiers.arena import layout as layout
from tierfall.tiers.arena.arena import Arena
from tierfall.tiers.arena.layout import SLOT_COUNT
from tierfall.tiers.arena.region import Region

RUN = "killed"
CAPACITY = 512 << 10
GROWN = 768 << 10
SHARD = Shard(3, 8)

Entry = dict[str, Any]


def image_of(seed: int, number: int) -> bytes:
    source = random.Random(f"image {seed} {number}")
    return source.randbytes(source.randrange(1, 40_000))


def records_of(seed: int, number: int) -> tuple[bytes, bytes]:
    source = random.Random(f"records {seed} {number}")
    return source.randbytes(source.randrange(0, 3000)), source.randbytes(source.randrange(0, 900))


def mark_of(seed: int, number: int, index: int) -> bytes:
    source = random.Random(f"mark {seed} {number} {index}")
    return source.randbytes(source.randrange(0, 300))


class Worker:
    """The child: does operations on the arena and tells the journal before and after each."""

    def __init__(self, path: Path, seed: int, journal: int) -> None:
        self.path = path
        self.seed = seed
        self.journal = journal
        self.regions: dict[int, Region] = {}
        self.marks: dict[int, int] = {}
        self.count = 0

    def tell(self, **entry: Any) -> None:
        os.write(self.journal, json.dumps(entry).encode() + b"\n")

    def create(self) -> None:
        self.tell(begin="create")
        self.arena = Arena.create(self.path, run=RUN, shard=SHARD, slot=0, capacity_bytes=CAPACITY)
        self.tell(done="create")

    def seal(self) -> None:
        number, self.count = self.count, self.count + 1
        image = image_of(self.seed, number)
        manifest, commit = records_of(self.seed, number)
        region = self.arena.allocate(
            image_bytes=len(image), records_bytes=len(manifest) + len(commit)
        )
        if region is None:
            return
        self.tell(begin="seal", number=number, slot=region._slot)
        region.image[:] = image
        region.seal(manifest=manifest, commit=commit)
        self.tell(done="seal", number=number)
        self.regions[number], self.marks[number] = region, 0

    def mark(self, number: int) -> None:
        index = self.marks[number]
        self.marks[number] += 1
        self.tell(begin="mark", number=number)
        self.regions[number].add_mark(mark_of(self.seed, number, index))
        self.tell(done="mark", number=number)

    def release(self, number: int) -> None:
        """Every second one is unsealed first, as what is still being read is."""
        self.tell(begin="release", number=number)
        region = self.regions.pop(number)
        if number % 2:
            region.unseal()
            self.tell(done="release", number=number)
        region.release()
        self.tell(done="release", number=number)

    def grow(self) -> None:
        self.tell(begin="grow")
        self.arena.grow(GROWN)
        self.tell(done="grow")

    def short_script(self) -> None:
        """Each operation once or twice, on fresh and on used slots."""
        self.create()
        self.seal()
        self.seal()
        self.mark(0)
        self.mark(0)
        self.mark(1)
        self.release(0)
        self.seal()
        self.grow()
        self.mark(2)
        self.seal()
        self.release(1)

    def endless_script(self) -> NoReturn:
        source = random.Random(self.seed)
        self.create()
        while True:
            self.seal()
            if self.regions and source.random() < 0.5:
                self.mark(source.choice(list(self.regions)))
            if len(self.regions) > 6 or (self.regions and source.random() < 0.3):
                self.release(source.choice(list(self.regions)))
            if source.random() < 0.02:
                self.grow()


class Expected:
    """What must and what may be in the arena, by the journal alone."""

    def __init__(self, entries: list[Entry]) -> None:
        self.created = self.maybe_created = False
        self.capacities = {CAPACITY}
        self.must: set[int] = set()
        self.may: set[int] = set()
        self.marks: dict[int, int] = {}
        self.marking: set[int] = set()
        for entry in entries:
            name = ("begun_" if "begin" in entry else "done_") + entry.get(
                "begin", entry.get("done")
            )
            getattr(self, name)(entry.get("number"))

    def begun_create(self, _: int) -> None:
        self.maybe_created = True

    def done_create(self, _: int) -> None:
        self.created = True

    def begun_seal(self, number: int) -> None:
        self.may.add(number)
        self.marks[number] = 0

    def done_seal(self, number: int) -> None:
        self.must.add(number)

    def begun_mark(self, number: int) -> None:
        self.marking.add(number)

    def done_mark(self, number: int) -> None:
        self.marking.discard(number)
        self.marks[number] += 1

    def begun_release(self, number: int) -> None:
        self.must.discard(number)

    def done_release(self, number: int) -> None:
        self.may.discard(number)

    def begun_grow(self, _: int) -> None:
        self.capacities.add(GROWN)

    def done_grow(self, _: int) -> None:
        self.capacities = {GROWN}


def check(path: Path, seed: int, entries: list[Entry]) -> int:
    """Attach and compare; return how many sealed images were found."""
    expected = Expected(entries)
    try:
        arena = Arena.attach(path, run=RUN)
    except KeyNotFoundError:
        assert not expected.created, "the arena is gone"
        # A later create must not trip over what the killed one left, and collects it.
        arena = Arena.create(path, run=RUN, shard=SHARD, slot=0, capacity_bytes=CAPACITY)
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    assert not arena.damage, arena.damage
    assert arena.capacity_bytes in expected.capacities
    assert path.stat().st_size == layout.EXTENTS_START + arena.capacity_bytes
    found = {identify(region, seed, expected) for region in arena.regions()}
    assert len(found) == len(arena.regions())
    assert expected.must <= found <= expected.may, (expected.must, found, expected.may)
    taken = sum(region.extent.length for region in arena.regions())
    assert arena.free_bytes == arena.capacity_bytes - taken
    fill_the_rest(arena)
    for region in arena.regions():
        region.release()
    assert arena.largest_free_bytes == arena.capacity_bytes
    arena.close(keep=False)
    assert os.listdir(path.parent) == []
    return len(found)


def identify(region: Region, seed: int, expected: Expected) -> int:
    """Return the number whose image this is, bit for bit with its records and marks."""
    for number in expected.may:
        if region.image == image_of(seed, number):
            assert region.sealed
            assert region.shard == SHARD
            assert (region.manifest(), region.commit()) == records_of(seed, number)
            marks = region.marks()
            least = expected.marks[number]
            most = least + (number in expected.marking)
            assert least <= len(marks) <= most, (least, len(marks), most)
            assert marks == tuple(mark_of(seed, number, i) for i in range(len(marks)))
            return number
    raise AssertionError(f"an image that nobody sealed, at {region.extent}")


def fill_the_rest(arena: Arena) -> None:
    """Whatever is free can be used, and using it changes no sealed image."""
    before = {region: region.image.tobytes() for region in arena.regions()}
    while arena.largest_free_bytes and len(arena.regions()) < SLOT_COUNT:
        region = arena.allocate(image_bytes=arena.largest_free_bytes, records_bytes=0)
        assert region is not None
        region.image[:] = b"\xaa" * region.image_bytes
    for region, image in before.items():
        assert region.image == image


def run_child(path: Path, seed: int, prepare: Callable[[], None], endless: bool) -> tuple[int, int]:
    """Fork a worker; return its pid and the reading end of its journal."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    prepare()
    worker = Worker(path, seed, writer)
    if endless:
        worker.endless_script()
    worker.short_script()
    os._exit(0)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def die_at(point: int) -> None:
    """Replace what changes the file by versions that kill the process at their ``point``-th half step."""
    steps = iter(range(1_000_000))

    def step() -> None:
        if next(steps) == point:
            die()

    store, publish, rename, reserve = (
        layout.store,
        layout.publish,
        os.rename,
        os.posix_fallocate,
    )

    def torn_store(view: memoryview, offset: int, data: bytes) -> None:
        step()
        store(view, offset, data[: len(data) // 2])
        step()
        store(view, offset, data)

    def with_steps(real: Callable[..., None]) -> Callable[..., None]:
        def stepping(*args: Any) -> None:
            step()
            real(*args)
            step()

        return stepping

    layout.store = torn_store
    layout.publish = with_steps(publish)
    os.rename = with_steps(rename)  # type: ignore[assignment]
    os.posix_fallocate = with_steps(reserve)


def lines(reader: int) -> Iterator[Entry]:
    with os.fdopen(reader, "rb") as journal:
        for line in journal:
            yield json.loads(line)


def kill_at_points(folder: Path) -> None:
    path = folder / "slot-0.arena"
    sealed = 0
    for point in range(10_000):
        child, reader = run_child(path, 7, lambda point=point: die_at(point), endless=False)
        entries = list(lines(reader))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sealed += check(path, 7, entries)
        if code == 0:
            print(f"points {point} sealed {sealed}")
            return
        assert code == -signal.SIGKILL, f"the worker failed with {code} at point {point}"
    raise AssertionError("the script never ended")


def kill_at_random(folder: Path, count: int) -> None:
    path = folder / "slot-0.arena"
    sealed = 0
    for seed in range(count):
        child, reader = run_child(path, seed, lambda: None, endless=True)
        patience = random.Random(f"patience {seed}").randrange(1, 120)
        entries = []
        for entry in lines_until(reader, patience, child):
            entries.append(entry)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == -signal.SIGKILL, f"the worker failed with {code}"
        sealed += check(path, seed, entries)
    print(f"kills {count} sealed {sealed}")


def lines_until(reader: int, patience: int, child: int) -> Iterator[Entry]:
    """Yield the whole journal, and kill its writer after some lines; it goes on until the signal arrives."""
    for index, entry in enumerate(lines(reader)):
        if index == patience:
            os.kill(child, signal.SIGKILL)
        yield entry


if __name__ == "__main__":
    if sys.argv[2] == "points":
        kill_at_points(Path(sys.argv[1]))
    else:
        kill_at_random(Path(sys.argv[1]), int(sys.argv[3]))
