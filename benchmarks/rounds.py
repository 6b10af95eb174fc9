"""Rounds: every contender once a round, in an order that is shuffled anew, each from the same quiet state."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import Finding, over_rounds
from tierfall.core.runtime.pinned import synchronize

Figures = Mapping[str, float]
Measured = Mapping[tuple[str, str], float]
"""Figures of any unit, by name and unit."""


def nothing() -> None:
    """Nothing to prepare, or to clean up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """``timed`` is what counts, and may return further figures in seconds; ``before`` and ``after`` do not count.

    ``then`` are measured right after it, in this order: a load needs the save that it loads.
    """

    name: str
    timed: Callable[[], Figures | None]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing
    then: tuple[Contender, ...] = ()


def quiet() -> None:
    """Let what was written reach the disk, a GPU be idle, and nothing be collected in the next timed section."""
    gc.collect()
    os.sync()
    synchronize()


def run_rounds(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seed: int,
    settle: Callable[[], None] = quiet,
    say: Callable[[str], None] = lambda line: None,
    warms_up: bool = True,
    may_begin: Callable[[float], bool] = lambda longest_s: True,
) -> dict[str, list[float]]:
    """Return the seconds of every series, one sample a round; a first round that ``warms_up`` is left out.

    ``may_begin`` is asked before each round, with the seconds of the longest so far; after a no there is none.
    """
    shuffle = random.Random(seed)
    samples: dict[str, list[float]] = {}
    longest_s = 0.0
    for number in range(-1 if warms_up else 0, rounds):
        if not may_begin(longest_s):
            break
        began_s = time.perf_counter()
        order = list(contenders)
        shuffle.shuffle(order)
        for contender in (each for first in order for each in (first, *first.then)):
            for name, seconds in _measure(contender, settle).items():
                if number >= 0:
                    samples.setdefault(name, []).append(seconds)
                which = "warm-up" if number < 0 else f"{number + 1}/{rounds}"
                say(f"  {which:>7}  {name:<28} {seconds:8.4f} s")
        longest_s = max(longest_s, time.perf_counter() - began_s)
    return samples


def _measure(contender: Contender, settle: Callable[[], None]) -> dict[str, float]:
    contender.before()
    settle()
    began = time.perf_counter()
    further = contender.timed()
    seconds = time.perf_counter() - began
    contender.after()
    named = {f"{contender.name}/{key}": value for key, value in (further or {}).items()}
    return {contender.name: seconds, **named}


def find_each(kinds: Mapping[str, Callable[[int], Measured]], *, rounds: int) -> list[Finding]:
    """Measure each kind once a round, given the round's number; return each of its figures over the rounds."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for kind, measure in kinds.items():
            for (name, unit), value in measure(number).items():
                found.setdefault((f"{kind}: {name}", unit), []).append(value)
    return [over_rounds(name, values, unit=unit) for (name, unit), values in found.items()]
