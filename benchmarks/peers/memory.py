"""How much memory a system takes to save: one process for each, beside the same process that only trains.

``python -m benchmarks.peers.memory`` prints one JSON object. Anonymous memory is the process's RssAnon and what its
children hold alone (a forked child shares the rest); shared memory is told apart, since it is a fixed pool.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from benchmarks import bare, memory
from benchmarks.peers import registry
from benchmarks.peers.system import Task
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
    """Return the other processes of this process's session; ``registry.measure_apart`` gives it one of its own."""
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


def measure_here(task: Task) -> dict[str, int]:
    """Save a few times while the optimizer steps, and return the peaks beyond those without saving."""
    work = Workload(shape_for(task.size_bytes), device=task.device)
    work.train(1)
    gc.collect()
    bare.give_back_freed()
    with Peaks() as without:
        work.update()
    with Peaks() as peaks:
        system = registry.type_of(task.key)(work, task.place)
        for _ in range(SAVES):
            system.forget()
            system.save()
            with system.updating():
                work.update()
            system.wait()
        system.close()
    return {kind: peaks.bytes[kind] - without.bytes[kind] for kind in peaks.bytes}


def main() -> None:
    print(json.dumps(measure_here(Task.parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
