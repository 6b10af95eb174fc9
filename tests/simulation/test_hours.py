"""Sixty hours of training, each drawn by a seed: nothing that was promised is broken. There is more of it in
``make simulate``.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.hour import run_hour
from tierfall.core.types.values import LossClass
from tierfall.policies.cadence import IntervalBound

HOURS = 40
BLOCKS = 20


@cache
def seen_in(seed: int) -> Counter[str]:
    """What was lost, and what decided about saves."""
    hour = run_hour(seed)
    set_aside = Counter(set_aside=len(hour.set_aside))
    return Counter(hour.lost) + hour.watch.bounds + hour.counts + set_aside


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_hour_of_one_rank_breaks_a_promise(block: int) -> None:
    for seed in range(block, HOURS, BLOCKS):
        seen_in(seed)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(10482, id="a drop that had failed, and what it relied on has gone"),
        pytest.param(20543, id="a copy whose source does not answer is not set aside"),
        pytest.param(50250, id="a pin of what a tier had already, as turned out later"),
        pytest.param(70176, id="a drop that failed half-way, and a pin of the copy from outside"),
        pytest.param(70417, id="a drop that failed half-way, of what is the newest by now"),
        pytest.param(80491, id="a drop that failed, and another copy was dropped for room"),
        pytest.param(70555, id="a copy whose fsync fails again and again"),
        pytest.param(20467, id="a deletion that a start finds makes room"),
        pytest.param(30230, id="two attempts of a number, one of which has only saved into memory"),
        pytest.param(80256, id="a rest on a full tier, of a copy that is still owed"),
        pytest.param(80393, id="a zombie saves into the memory of its own machine"),
        pytest.param(70108, id="two full tiers that make room for each other take copies late"),
        pytest.param(70672, id="a tier that does not answer for long takes copies late"),
        pytest.param(84176, id="the only copy is misread once, as another tier is to get it"),
        pytest.param(84295, id="the commit record of a source is misread once"),
        pytest.param(84597, id="a pin in memory of what a tier has that does not answer"),
        pytest.param(84459, id="an image leaves memory while its commit record is written"),
        pytest.param(85042, id="a damaged copy of a lineage that was left behind"),
        pytest.param(
            85701, id="a late copy, and room that older ones leave once newer are verified"
        ),
        pytest.param(
            85952, id="what was owed has no good source, as turns out too late for others"
        ),
        pytest.param(
            85968, id="saves find memory full of an earlier start's, and the process ends"
        ),
        pytest.param(86118, id="saves add more from one on, and the process ends"),
    ],
)
def test_an_hour_that_broke_a_promise_once(seed: int) -> None:
    run_hour(seed)


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
