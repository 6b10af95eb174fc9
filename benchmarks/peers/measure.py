"""The part ``peers``: every installed system saves and loads one state, in a shuffled order, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks import bare
from benchmarks.bare import Buffer
from benchmarks.figures import Results
from benchmarks.peers import memory, registry
from benchmarks.peers.system import Place, System
from benchmarks.plan import Plan
from benchmarks.rounds import Contender, Figures, run_rounds
from benchmarks.workload import Workload, bytes_of, shape_for
from tierfall.core.runtime.pinned import synchronize

PREFIX = "peers"
TRAINING_STEPS = 2


def series(key: str, what: str) -> str:
    """Name the series of a system: ``save`` (until durable), ``save/blocked``, ``cold`` or ``warm``."""
    return f"{PREFIX}.{key}.{what}"


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Fill in the samples of all systems, and what memory each takes."""
    chosen = registry.chosen(plan.systems)
    results.facts["systems"] = {system.key: system.name for system in chosen}
    results.facts["systems_missing"] = registry.missing(plan.systems)
    direct = bare.direct_works(plan.folder, plan.file_system)
    say("peers: each saves, makes durable, and loads the same state, cold and warm")
    work = Workload(shape_for(plan.size_bytes), device=plan.device)
    work.train(TRAINING_STEPS)
    results.facts["peers_state_bytes"] = bytes_of(work.tensors())
    saved = Buffer(work.tensors(), touched=True)
    opened: list[System] = []
    try:
        for number, system in enumerate(chosen):
            opened.append(system(work, place_of(plan, f"peer-{number}", direct=direct)))
        contenders = [_contender(each, saved) for each in opened]
        found = run_rounds(contenders, rounds=plan.rounds, seed=plan.seed, say=say)
        results.samples.update(found)
    finally:
        for each in opened:
            each.close()
    del opened, contenders, saved, work
    say("peers: memory, each in a process of its own")
    results.facts["memory_state_bytes"] = min(plan.size_bytes, memory.SIZE_MAX_BYTES)
    results.facts["systems_memory"] = {
        system.key: memory.measure_apart(plan, system.key) for system in chosen
    }


def place_of(plan: Plan, name: str, *, direct: bool) -> Place:
    """Make folders of its own for one system."""
    place = Place(folder=plan.folder / name, memory=plan.memory / name, direct=direct)
    place.folder.mkdir()
    place.memory.mkdir()
    return place


def _plain(load: Callable[[], None]) -> Callable[[], Figures]:
    """A load has no figures beside its own seconds; it is done when a GPU holds it."""

    def run() -> Figures:
        load()
        synchronize()
        return {}

    return run


def _contender(system: System, saved: Buffer) -> Contender:
    """A save with a cold and a warm load of it."""
    work = system.work

    def make_room() -> None:
        work.update()
        system.forget()

    def save() -> Figures:
        began = time.perf_counter()
        system.save()
        blocked = time.perf_counter() - began
        system.wait()
        return {"blocked": blocked}

    def check() -> None:
        if not saved.holds(work.tensors()):
            raise AssertionError(f"{system.name}: what was loaded is not what was saved")

    def begin_cold() -> None:
        work.spoil()
        system.begin_cold()

    return Contender(
        name=series(system.key, "save"),
        before=make_room,
        timed=save,
        after=lambda: saved.take(work.tensors()),
        then=(
            Contender(
                name=series(system.key, "cold"),
                before=begin_cold,
                timed=_plain(system.load_cold),
                after=check,
            ),
            Contender(
                name=series(system.key, "warm"),
                before=work.spoil,
                timed=_plain(system.load),
                after=check,
            ),
        ),
    )
