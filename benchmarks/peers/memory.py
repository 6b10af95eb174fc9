"""How much memory a system takes to save: one process for each, beside the same process that only trains.

``python -m benchmarks.peers.memory`` prints one JSON object. Anonymous memory is the process's RssAnon and what its
children hold alone (a forked child shares the rest); shared memory is told apart, since it is a fixed pool.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from benchmarks import apart, bare, machine, memory
from benchmarks.peers import registry
from benchmarks.peers.system import Place
from benchmarks.plan import Plan
from benchmarks.workload import Workload, shape_for

SAMPLE_EVERY_S = 0.01
SAVES = 3
SIZE_MAX_BYTES = 512 << 20
ANONYMOUS, SHARED = "anonymous_bytes", "shared_bytes"


class Peaks:
    """The most of each kind of memory while it is entered, sampled on a thread of its own."""

    def __init__(self) -> None:
        self.bytes = {ANONYMOUS: 0, SHARED: 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="family-peaks")

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.sample()

    def sample(self) -> None:
        now = {
            ANONYMOUS: memory.resident_bytes() + sum(map(_own_bytes, children())),
            SHARED: memory.resident_bytes("RssShmem:"),
        }
        self.bytes = {kind: max(self.bytes[kind], now[kind]) for kind in now}

    def __enter__(self) -> Peaks:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()


def children() -> list[int]:
    """Return the other processes of this process's session; ``measure_apart`` gives it one of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            session = int(path.read_text().rpartition(")")[2].split()[3])
            if session == os.getsid(0) and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def _own_bytes(process: int) -> int:
    """Return what a process holds that nobody shares."""
    with suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) << 10
    return 0


def measure(key: str, size_bytes: int, place: Place, device: str) -> dict[str, int]:
    """Save a few times while the optimizer steps, and return the peaks beyond those without saving."""
    system_type = next(each for each in registry.SYSTEMS if each.key == key)
    work = Workload(shape_for(size_bytes), device=device)
    work.train(1)
    gc.collect()
    bare.give_back_freed()
    with Peaks() as without:
        work.update()
    with Peaks() as peaks:
        system = system_type(work, place)
        for _ in range(SAVES):
            system.forget()
            system.save()
            with system.updating():
                work.update()
            system.wait()
        system.close()
    return {kind: peaks.bytes[kind] - without.bytes[kind] for kind in peaks.bytes}


def measure_apart(plan: Plan, key: str) -> dict[str, int]:
    """Run ``measure`` in a fresh process and session, and return what it printed."""
    size_bytes = min(plan.size_bytes, SIZE_MAX_BYTES)
    with apart.own_folders(plan, "memory-apart") as (folder, memory):
        words = [str(size_bytes), key, str(folder), str(memory), plan.device]
        return apart.run("benchmarks.peers.memory", words, own_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("key")
    parser.add_argument("folder", type=Path)
    parser.add_argument("memory", type=Path)
    parser.add_argument("device")
    given = parser.parse_args()
    direct = bare.direct_works(given.folder, machine.file_system(given.folder))
    place = Place(folder=given.folder, memory=given.memory, direct=direct)
    print(json.dumps(measure(given.key, given.size_bytes, place, given.device)))


if __name__ == "__main__":
    main()
