"""Hours of training, each drawn by a seed: nothing that was promised is broken. ``make torture`` lives through more of
them, ``make simulate`` through thousands."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.hour import run_hour
from tierfall.core.types.values import LossClass
from tierfall.policies.cadence import IntervalBound

HOURS = 40
QUICK = range(8)
"""The hours of ``make test``."""


@cache
def seen_in(seed: int) -> Counter[str]:
    """What was lost, and what decided about saves."""
    hour = run_hour(seed)
    set_aside = Counter(set_aside=len(hour.set_aside))
    return Counter(hour.lost) + hour.watch.bounds + hour.counts + set_aside


@pytest.mark.parametrize(
    "seed",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.torture) for n in range(len(QUICK), HOURS))],
)
def test_no_hour_of_one_rank_breaks_a_promise(seed: int) -> None:
    seen_in(seed)


@pytest.mark.torture
def test_all_that_may_happen_comes_about() -> None:
    seen: Counter[str] = sum((seen_in(seed) for seed in range(HOURS)), Counter())
    assert seen[LossClass.PROCESS] > 15
    assert seen[LossClass.NODE] > 7
    assert seen["set_aside"] > 7
    assert seen["unmounted"] > 30
    assert seen["unread"] > 24, "too few starts could not look at a tier"
    assert seen["anew"] > 6, "too few begin anew while a tier is away"
    assert seen["unsynced"] > 1, "too little goes with a power cut"
    bounds = set(IntervalBound) - {IntervalBound.OWN}
    assert not {bound for bound in bounds if seen[bound] < 30}, (
        "too little is saved by some cadence"
    )
