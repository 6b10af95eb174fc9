"""How much memory of its own tierfall takes: the peak of RssAnon over saves and restores, in a process of its own.

``python -m benchmarks.memory`` prints one JSON object. The model, its gradients and the optimizer's state are there
before, tierfall is imported, and what counts is what comes on top of the same process stepping its optimizer. Shared
memory is not anonymous and does not count: it is the host tier's own capacity, known from the start.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierfall
from benchmarks import apart, bare
from benchmarks.chain import FILE, HOST, configuration
from benchmarks.plan import Plan
from benchmarks.workload import Workload, shape_for

SAMPLE_EVERY_S = 0.002
KEY = "RssAnon:"


def resident_bytes(key: str = KEY) -> int:
    """Return this process's memory of one kind that is in RAM, anonymous where nothing is said."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {key}")


class Peaks:
    """Samples memory on a thread of its own, and keeps the peak of each phase."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._phase = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-peaks")

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self.sample()

    def sample(self) -> None:
        phase, now = self._phase, resident_bytes()
        if phase:
            self.bytes[phase] = max(self.bytes.get(phase, 0), now)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        self.sample()
        try:
            yield
        finally:
            self.sample()
            self._phase = ""

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(plan: Plan) -> dict[str, Any]:
    """Save and restore ``rounds`` times, and return the peaks in bytes beyond those without tierfall."""
    work = Workload(shape_for(plan.size_bytes), device=plan.device)
    work.train(2)
    gc.collect()
    bare.give_back_freed()
    with Peaks() as peaks:
        with peaks.phase("without"):
            for _ in range(plan.rounds):
                work.update()
        _use(plan, work, peaks)
    base = peaks.bytes.pop("without")
    beyond = {phase: peak - base for phase, peak in peaks.bytes.items()}
    return {"base_bytes": base, "extra_bytes": max(beyond.values()), "phases": beyond}


def _use(plan: Plan, work: Workload, peaks: Peaks) -> None:
    with peaks.phase("open and save"):
        ckpt = tierfall.open(configuration(plan.memory / "memory", plan.folder / "tier"))
        for step in range(plan.rounds):
            ckpt.save(step, work.state)
            work.update()
        ckpt.drain()
    with peaks.phase("restore from the host tier"):
        for _ in range(plan.rounds):
            ckpt.restore(work.state, tier=HOST)
        ckpt.close()
    with peaks.phase("restore from the file tier"):
        ckpt = tierfall.open(configuration(plan.memory / "memory", plan.folder / "tier"))
        for _ in range(plan.rounds):
            ckpt.restore(work.state, tier=FILE)
        ckpt.close()


def measure_apart(plan: Plan) -> dict[str, Any]:
    """Run ``measure`` in a fresh process, and return what it printed."""
    arguments = {
        "--folder": plan.folder,
        "--memory": plan.memory,
        "--file-system": plan.file_system,
        "--size-bytes": plan.size_bytes,
        "--rounds": plan.rounds,
        "--device": plan.device,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    return apart.run("benchmarks.memory", words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--file-system", required=True)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", required=True)
    plan = Plan(**vars(parser.parse_args()), seed=0, only=frozenset())
    print(json.dumps(measure(plan)))


if __name__ == "__main__":
    main()
