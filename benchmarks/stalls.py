"""How long the training thread stands still while a checkpoint is flushed: gaps of a loop of short work.

Each turn of the loop takes about a millisecond, half of it Python and half of it torch. What a turn takes beyond that,
it waited: for the interpreter, or for a core. ``save`` itself and the optimizer's step are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.figures import Results, over_rounds
from benchmarks.peers.ours import Tierfall
from benchmarks.plan import Plan
from benchmarks.rounds import quiet

WINDOW_S = 2.0
GROWTH_TARGET_MS = 10.0
SIDE = 192
COUNTED = 8_000


class Loop:
    """Short work, and the milliseconds that each turn of it took."""

    def __init__(self) -> None:
        self._matrix = torch.ones(SIDE, SIDE)
        self.turns_ms: list[float] = []

    def turn(self) -> None:
        began = time.perf_counter()
        total = 0
        for number in range(COUNTED):
            total += number
        torch.mm(self._matrix, self._matrix)
        self.turns_ms.append((time.perf_counter() - began) * 1e3)

    @property
    def spent_s(self) -> float:
        return sum(self.turns_ms) / 1e3


def percentile(values: list[float], share: float) -> float:
    """Return the least value that is at least as large as a share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def alone() -> list[float]:
    """Turns without any save."""
    loop = Loop()
    while loop.spent_s < WINDOW_S:
        loop.turn()
    return loop.turns_ms


def while_flushing(system: Tierfall) -> list[float]:
    """Turns while one save after the other is captured and written."""
    loop = Loop()
    while loop.spent_s < WINDOW_S:
        system.work.update()
        system.save()
        while system.under_way():
            loop.turn()
        system.wait()
    return loop.turns_ms


def measure_stalls(
    plan: Plan, say: Callable[[str], None], results: Results, system: Tierfall
) -> None:
    """Find how much the 99th percentile of a turn grows while tierfall flushes."""
    say("stalls: a loop of short work, with and without a flush beside it")
    found: dict[str, list[float]] = {"p99": [], "p99, flushing": [], "longest, flushing": []}
    for _ in range(plan.rounds):
        quiet()
        found["p99"].append(percentile(alone(), 0.99))
        quiet()
        turns = while_flushing(system)
        found["p99, flushing"].append(percentile(turns, 0.99))
        found["longest, flushing"].append(max(turns))
    growth = [b - a for a, b in zip(found["p99"], found["p99, flushing"], strict=True)]
    results.findings.append(
        over_rounds("p99 of stalls grows by", growth, unit="ms", target=GROWTH_TARGET_MS)
    )
    results.findings += [
        over_rounds(f"one turn, {name}", values, unit="ms") for name, values in found.items()
    ]
