"""One system in a process of its own. ``python -m benchmarks.peers.alone`` prints the samples of one round as JSON.

The process trains, saves, and loads cold and warm; then it trains a step right after a save. Everything happens once
before, to warm up: the buffers of a system that keeps some are there.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks import apart
from benchmarks.bare import Buffer
from benchmarks.peers import registry
from benchmarks.peers.system import System, Task
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds
from benchmarks.workload import Workload, shape_for
from tierfall.core.runtime.pinned import synchronize

PREFIX = "peers"
TRAINING_STEPS = 2
UPDATES = 3


def series(key: str, what: str) -> str:
    """Name the series of a system: ``save`` (until durable), ``cold``, ``warm``, or ``step`` with ``step/call`` (until
    the call returns) and ``step/held`` (until the state may change)."""
    return f"{PREFIX}.{key}.{what}"


def measure(plan: Plan, key: str, *, direct: bool) -> dict[str, list[float]]:
    """Measure one round of a system in a process of its own, which finds an empty page cache."""
    apart.drop_page_cache()
    return registry.measure_apart(plan, __name__, key, direct=direct)


def measure_here(task: Task) -> dict[str, list[float]]:
    """Measure one round of a system in this process."""
    work = Workload(shape_for(task.size_bytes), device=task.device)
    work.train(TRAINING_STEPS)
    saved = Buffer(work.tensors(), touched=True)
    system = registry.type_of(task.key)(work, task.place)
    try:
        return run_rounds(contenders(system, saved), rounds=1, seed=0)
    finally:
        system.close()


def contenders(system: System, saved: Buffer) -> list[Contender]:
    """Return a save with a cold and a warm load of it, and a training step that begins with a save."""
    work = system.work
    usual_s: list[float] = []

    def make_room() -> None:
        work.update()
        system.forget()

    def save() -> None:
        system.save()
        system.wait()

    def check() -> None:
        if not saved.holds(work.tensors()):
            raise AssertionError(f"{system.name}: what was loaded is not what was saved")

    def begin_cold() -> None:
        work.spoil()
        system.begin_cold()

    def time_updates() -> None:
        usual_s[:] = [_seconds(work.update) for _ in range(UPDATES)]
        system.forget()

    def update() -> None:
        with system.updating():
            work.update()

    def step() -> Figures:
        call_s = _seconds(system.save)
        work.backward()
        beyond_s = _seconds(update) - statistics.median(usual_s)
        return {"call": call_s, "held": call_s + max(0.0, beyond_s)}

    cold = Contender(
        name=series(system.key, "cold"),
        before=begin_cold,
        timed=_idle_after(system.load_cold),
        after=check,
    )
    warm = Contender(
        name=series(system.key, "warm"),
        before=work.spoil,
        timed=_idle_after(system.load),
        after=check,
    )
    saves = Contender(
        name=series(system.key, "save"),
        before=make_room,
        timed=save,
        after=lambda: saved.take(work.tensors()),
        then=(
            cold,
            warm,
            Contender(
                name=series(system.key, "step"),
                before=time_updates,
                timed=step,
                after=system.wait,
            ),
        ),
    )
    return [saves]


def _seconds(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began_s


def _idle_after(load: Callable[[], None]) -> Callable[[], None]:
    """A load is done when a GPU holds it."""

    def run() -> None:
        load()
        synchronize()

    return run


def main() -> None:
    print(json.dumps(measure_here(Task.parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
