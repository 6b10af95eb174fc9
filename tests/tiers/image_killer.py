"""Kills processes that work on host memory, and checks what they leave; ``test_host_model.py`` runs it as a process.

A child works through a seeded script and writes a journal into a pipe: what it is about to do, and what it has done.
After its SIGKILL this process opens the memory and compares it with the journal: what was done is there bit for bit,
what was begun is there whole or not at all, and the rest is free. The child is forked: this process runs no threads.

    image_killer.py FOLDER points          kill at every store and reservation of one script, one after another
    image_killer.py FOLDER random COUNT    kill COUNT endless scripts after a random number of journal lines
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

from tierfall.core.types.values import Shard
from tierfall.tiers import image_file
from tierfall.tiers.host import HostTier
from tierfall.tiers.image_file import Region

RUN = "killed"
CAPACITY = 512 << 10
SHARD = Shard(3, 8)

Entry = dict[str, Any]


def host_in(folder: Path) -> HostTier:
    return HostTier(
        name="host", run=RUN, folder=folder, slot=0, shard=SHARD, capacity_bytes=CAPACITY
    )


def image_of(seed: int, number: int) -> bytes:
    """Images grow: free files give way to larger ones."""
    source = random.Random(f"image {seed} {number}")
    return source.randbytes(source.randrange(1, 5000 * (1 + min(number, 12))))


def records_of(seed: int, number: int) -> tuple[bytes, bytes]:
    source = random.Random(f"records {seed} {number}")
    return source.randbytes(source.randrange(0, 3000)), source.randbytes(source.randrange(0, 900))


class Worker:
    """The child: does operations on its memory and tells the journal before and after each."""

    def __init__(self, folder: Path, seed: int, journal: int) -> None:
        self.host = host_in(folder)
        self.seed = seed
        self.journal = journal
        self.regions: dict[int, Region] = {}
        self.count = 0

    def tell(self, **entry: Any) -> None:
        os.write(self.journal, json.dumps(entry).encode() + b"\n")

    def seal(self) -> None:
        number, self.count = self.count, self.count + 1
        image = image_of(self.seed, number)
        manifest, commit = records_of(self.seed, number)
        needed = {"image_bytes": len(image), "records_bytes": len(manifest) + len(commit)}
        self.host.ensure_capacity(**needed)
        region = self.host.allocate(**needed)
        if region is None:
            return
        self.tell(begin="seal", number=number)
        region.image[:] = image
        region.seal(manifest=manifest, commit=commit)
        self.tell(done="seal", number=number)
        self.regions[number] = region

    def note(self, number: int) -> None:
        self.tell(begin="note", number=number)
        self.regions[number].note_on_peers()
        self.tell(done="note", number=number)

    def release(self, number: int) -> None:
        """Every second one is unsealed first, as what is still being read is."""
        self.tell(begin="release", number=number)
        region = self.regions.pop(number)
        if number % 2:
            region.unseal()
            self.tell(done="release", number=number)
        region.release()
        self.tell(done="release", number=number)

    def short_script(self) -> None:
        """Each operation once or twice, on new and on used files."""
        self.seal()
        self.seal()
        self.note(0)
        self.note(1)
        self.release(0)
        self.seal()
        self.note(2)
        self.seal()
        self.release(1)
        self.seal()

    def endless_script(self) -> NoReturn:
        source = random.Random(self.seed)
        while True:
            self.seal()
            if self.regions and source.random() < 0.5:
                self.note(source.choice(list(self.regions)))
            if len(self.regions) > 6 or (self.regions and source.random() < 0.3):
                self.release(source.choice(list(self.regions)))


class Expected:
    """What must and what may be in memory, by the journal alone."""

    def __init__(self, entries: list[Entry]) -> None:
        self.must: set[int] = set()
        self.may: set[int] = set()
        self.noted: set[int] = set()
        self.may_be_noted: set[int] = set()
        for entry in entries:
            number = entry["number"]
            match entry.get("begin"), entry.get("done"):
                case "seal", None:
                    self.may.add(number)
                case None, "seal":
                    self.must.add(number)
                case "note", None:
                    self.may_be_noted.add(number)
                case None, "note":
                    self.noted.add(number)
                case "release", None:
                    self.must.discard(number)
                case None, "release":
                    self.may.discard(number)


def check(folder: Path, seed: int, entries: list[Entry]) -> int:
    """Open and compare; return how many sealed images were found."""
    expected = Expected(entries)
    host = host_in(folder)
    assert host._examine()[1].keys() <= {f for f in host._files if f.region}, "damaged headers"
    regions = [file.region for file in host._files if file.region is not None]
    found = {identify(region, seed, expected) for region in regions}
    assert len(found) == len(regions)
    assert expected.must <= found <= expected.may, (expected.must, found, expected.may)
    fill_the_rest(host, regions)
    for region in regions:
        region.release()
    host.close(keep=False)
    assert os.listdir(folder) == []
    return len(found)


def identify(region: Region, seed: int, expected: Expected) -> int:
    """Return the number whose image this is, bit for bit with its records."""
    for number in expected.may:
        if region.image == image_of(seed, number):
            assert region.sealed
            assert region.shard == SHARD
            assert (region.manifest(), region.commit()) == records_of(seed, number)
            assert (number in expected.noted) <= region.on_peers
            assert region.on_peers <= (number in expected.may_be_noted)
            return number
    raise AssertionError("an image that nobody sealed")


def fill_the_rest(host: HostTier, regions: list[Region]) -> None:
    """Whatever is free can be used, and using it changes no sealed image."""
    before = [(region, region.image.tobytes()) for region in regions]
    while (room := host.largest_free_bytes) >= image_file.PAGE_BYTES:
        room -= room % image_file.PAGE_BYTES
        host.ensure_capacity(image_bytes=room, records_bytes=0)
        region = host.allocate(image_bytes=room, records_bytes=0)
        assert region is not None, room
        region.image[:] = b"\xaa" * region.image_bytes
    for region, image in before:
        assert region.image == image


def run_child(
    folder: Path, seed: int, prepare: Callable[[], None], endless: bool
) -> tuple[int, int]:
    """Fork a worker; return its pid and the reading end of its journal."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    prepare()
    worker = Worker(folder, seed, writer)
    if endless:
        worker.endless_script()
    worker.short_script()
    os._exit(0)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def die_at(point: int) -> None:
    """Replace what changes a file by versions that kill the process at their ``point``-th half step."""
    steps = iter(range(1_000_000))

    def with_steps(real: Callable[..., None]) -> Callable[..., None]:
        def stepping(*args: Any) -> None:
            if next(steps) == point:
                die()
            real(*args)
            if next(steps) == point:
                die()

        return stepping

    image_file._publish = with_steps(image_file._publish)
    os.posix_fallocate = with_steps(os.posix_fallocate)
    os.ftruncate = with_steps(os.ftruncate)  # type: ignore[assignment]
    os.unlink = with_steps(os.unlink)  # type: ignore[assignment]


def lines(reader: int) -> Iterator[Entry]:
    with os.fdopen(reader, "rb") as journal:
        for line in journal:
            yield json.loads(line)


def kill_at_points(folder: Path) -> None:
    sealed = 0
    for point in range(10_000):
        child, reader = run_child(folder, 7, lambda point=point: die_at(point), endless=False)
        entries = list(lines(reader))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sealed += check(folder, 7, entries)
        if code == 0:
            print(f"points {point} sealed {sealed}")
            return
        assert code == -signal.SIGKILL, f"the worker failed with {code} at point {point}"
    raise AssertionError("the script never ended")


def kill_at_random(folder: Path, count: int) -> None:
    sealed = 0
    for seed in range(count):
        child, reader = run_child(folder, seed, lambda: None, endless=True)
        patience = random.Random(f"patience {seed}").randrange(1, 120)
        entries = []
        for entry in lines_until(reader, patience, child):
            entries.append(entry)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == -signal.SIGKILL, f"the worker failed with {code}"
        sealed += check(folder, seed, entries)
    print(f"kills {count} sealed {sealed}")


def lines_until(reader: int, patience: int, child: int) -> Iterator[Entry]:
    """Yield the whole journal, and kill its writer after some lines; the writer goes on until the signal arrives."""
    for index, entry in enumerate(lines(reader)):
        if index == patience:
            os.kill(child, signal.SIGKILL)
        yield entry


if __name__ == "__main__":
    if sys.argv[2] == "points":
        kill_at_points(Path(sys.argv[1]))
    else:
        kill_at_random(Path(sys.argv[1]), int(sys.argv[3]))
