"""The part ``peers``: every installed system saves and loads one state, each in a process of its own, in turn.

Before each process the page cache is dropped, where this user may, and all memory of the one before is free. The order
is shuffled anew in each round.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from benchmarks import apart, bare
from benchmarks.figures import Results
from benchmarks.peers import alone, damage, memory, registry
from benchmarks.peers.system import Place
from benchmarks.plan import Plan


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Fill in the samples of all systems, and what memory each takes."""
    chosen = registry.chosen(plan.systems)
    results.facts["systems"] = {system.key: system.name for system in chosen}
    results.facts["systems_missing"] = registry.missing(plan.systems)
    results.facts["peers_state_bytes"] = plan.size_bytes
    results.facts["page_cache_dropped"] = apart.drop_page_cache()
    direct = bare.direct_works(plan.folder, plan.file_system)
    say(
        "peers: each, in a process of its own, saves, makes durable, and loads the same state, cold and warm"
    )
    shuffle = random.Random(plan.seed)
    for number in range(plan.rounds):
        order = list(chosen)
        shuffle.shuffle(order)
        for system in order:
            for name, values in alone.measure(plan, system.key, direct=direct).items():
                results.samples.setdefault(name, []).extend(values)
                say(f"  {number + 1:>3}/{plan.rounds}  {name:<28} {values[-1]:8.4f} s")
    say("peers: memory, each in a process of its own")
    results.facts["memory_state_bytes"] = min(plan.size_bytes, memory.SIZE_MAX_BYTES)
    results.facts["systems_memory"] = {
        system.key: measure_apart(plan, memory, system.key, direct=direct) for system in chosen
    }
    say("peers: a load of files in which one bit has changed")
    results.facts["systems_damage"] = {
        system.key: measure_apart(plan, damage, system.key, direct=direct) for system in chosen
    }


def measure_apart(plan: Plan, part: ModuleType, key: str, *, direct: bool) -> dict[str, Any]:
    """Measure a system by ``memory`` or ``damage``, with a state of the size that is enough for that."""
    return registry.measure_apart(
        plan, part.__name__, key, direct=direct, size_max_bytes=part.SIZE_MAX_BYTES
    )


def place_of(plan: Plan, name: str, *, direct: bool) -> Place:
    """Make folders of its own for one system."""
    place = Place(folder=plan.folder / name, memory=plan.memory / name, direct=direct)
    place.folder.mkdir()
    place.memory.mkdir()
    return place
