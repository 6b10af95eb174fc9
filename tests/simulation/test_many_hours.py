"""Hours of training of several ranks, each drawn by a seed: nothing that was promised is broken."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.many_hour import run_many_hour
from tierfall.policies.cadence import IntervalBound

HOURS = 25
QUICK = range(5)
"""The hours of ``make test``; the others are those of ``make torture``."""
STORAGE_SEEDS = (1, 5)


@cache
def seen_in(seed: int) -> Counter[str]:
    hour = run_many_hour(seed)
    return Counter(hour.counts) + hour.watches[0].bounds


@pytest.mark.parametrize("seed", STORAGE_SEEDS)
def test_no_hour_of_several_ranks_whose_storage_fails_breaks_a_promise(seed: int) -> None:
    run_many_hour(seed, storage=True)


@pytest.mark.parametrize(
    "seed",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.torture) for n in range(len(QUICK), HOURS))],
)
def test_no_hour_of_several_ranks_breaks_a_promise(seed: int) -> None:
    seen_in(seed)


@pytest.mark.torture
def test_all_that_may_happen_comes_about() -> None:
    seen: Counter[str] = sum((seen_in(seed) for seed in range(HOURS)), Counter())
    common = (
        "WholeCheckpoint",
        "CommittedCopy",
        "GivenUpCopy",
        "SaveFailure",
        "DeletedCopy",
        "crash",
        "late",
    )
    common += tuple(bound for bound in IntervalBound if bound is not IntervalBound.OWN)
    assert not {what for what in common if not seen[what]}, "too little happens for a test of it"
