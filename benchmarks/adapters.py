"""What a save costs the loop of a training framework: its own checkpoints, and tierfall's by the adapter.

Each loop is a process of its own (``benchmarks.loops``), with the same model and the same steps: without saves, with
the framework's own, with tierfall's. The first save is left out: it takes the memory that later ones use.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from benchmarks import apart
from benchmarks.figures import Results
from benchmarks.loops import EVERY, LOOPS, MODULES, layers_for
from benchmarks.plan import Plan
from benchmarks.rounds import Measured, find_each

SIZE_BYTES = int(0.3 * 2**30)


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure, for each framework that is installed, how long a save holds the loop."""
    installed = []
    for framework in LOOPS:
        missing = [name for name in MODULES[framework] if find_spec(name) is None]
        if missing:
            say(f"adapters: {framework} is left out: {', '.join(missing)} is not installed")
        else:
            installed.append(framework)
    layers = layers_for(min(plan.size_bytes, SIZE_BYTES))
    say(f"adapters: loops of {', '.join(installed) or 'no framework'}, {layers} layers")
    kinds = {name: partial(_round, plan, name, layers) for name in installed}
    results.findings += find_each(kinds, rounds=plan.rounds)


def _round(plan: Plan, framework: str, layers: int, number: int) -> Measured:
    """Run a framework's loop in each way, in an order of chance."""
    ways = list(LOOPS[framework][1])
    random.Random(plan.seed + number).shuffle(ways)
    steps_s = {way: _steps_of(plan, framework, way, layers) for way in ways}
    usual_s = statistics.median(steps_s["none"])
    found: Measured = {("a step without saves", "s"): usual_s}
    for way in [way for way in LOOPS[framework][1] if way != "none"]:
        held_s, loop_s = held_by_saves(steps_s[way], usual_s)
        found[f"{way}: a save holds the loop", "s"] = held_s
        found[f"{way}: a save makes the loop longer", "s"] = loop_s
    return found


def held_by_saves(steps_s: list[float], usual_s: float) -> tuple[float, float]:
    """Return for how long a save holds its loop, and how much longer the loop is than one without saves, a save, in
    seconds: medians over the saves after the first.

    A save holds the loop in its own step and in the next, whose update waits for what is not captured yet; the other
    steps of the loop tell how long these two take without it. What a framework writes beside the training makes the
    others longer too.
    """
    cycles = [steps_s[at : at + EVERY] for at in range(2 * EVERY - 1, len(steps_s), EVERY)]
    cycles = [cycle for cycle in cycles if len(cycle) == EVERY]
    held = [sum(cycle[:2]) - 2 * statistics.median(cycle[2:]) for cycle in cycles]
    loop = [sum(cycle) - EVERY * usual_s for cycle in cycles]
    return statistics.median(held), statistics.median(loop)


def _steps_of(plan: Plan, framework: str, way: str, layers: int) -> list[float]:
    with apart.own_folders(plan, f"{framework}-{way}") as (folder, memory):
        apart.drop_page_cache()
        words = [framework, way, str(folder), str(memory), str(layers)]
        found = apart.run("benchmarks.loops", words)
    steps_s: list[float] = found["steps_s"]
    return steps_s
