"""Hours of training of several ranks, each drawn by a seed: nothing that was promised is broken."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.many_hour import run_many_hour
from tierfall.policies.cadence import IntervalBound

HOURS = 25
BLOCKS = 25
STORAGE_SEEDS = (0, 1, 2, 3, 5)


@cache
def seen_in(seed: int) -> Counter[str]:
    hour = run_many_hour(seed)
    return Counter(hour.counts) + hour.watches[0].bounds


@pytest.mark.parametrize("seed", STORAGE_SEEDS)
def test_no_hour_of_several_ranks_whose_storage_fails_breaks_a_promise(seed: int) -> None:
    run_many_hour(seed, storage=True)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(159, id="one rank has a part in memory that no rank flushes"),
        pytest.param(151, id="the record on one node alone names what a tier is still owed"),
        pytest.param(269, id="a tier is owed what another rank of the node had saved"),
        pytest.param(36, id="a part of what a person deleted, while a tier cannot be read"),
        pytest.param(46, id="a part of a lost rank is on a tier alone that another cannot reach"),
        pytest.param(82, id="a copy that failed is given up, and is found on another tier"),
        pytest.param(3036, id="a pin in memory, and a deletion that a command left on a tier"),
    ],
)
def test_an_hour_whose_storage_fails_that_broke_a_promise_once(seed: int) -> None:
    run_many_hour(seed, storage=True)


def test_the_only_image_in_memory_does_not_go_before_what_an_earlier_start_left() -> None:
    run_many_hour(84500)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_hour_of_several_ranks_breaks_a_promise(block: int) -> None:
    for seed in range(block, HOURS, BLOCKS):
        seen_in(seed)


def test_all_that_may_happen_comes_about() -> None:
    seen: Counter[str] = sum((seen_in(seed) for seed in range(25)), Counter())
    common = ("whole", "committed", "given_up", "save_given_up", "delete_copy", "crash", "late")
    common += tuple(bound for bound in IntervalBound if bound is not IntervalBound.OWN)
    assert not {what for what in common if not seen[what]}, "too little happens for a test of it"
