"""Cadence: the formulas match their papers, and the choice fits the measured facts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfall.core.types.values import LossClass, TierKind
from tierfall.core.types.view import TierRules
from tierfall.policies.cadence import (
    CadenceRules,
    IntervalBound,
    Measured,
    choose_interval,
    tier_cadences,
)
from tierfall.policies.formulas import checkfreq_steps, daly_s, overhead_steps, pccheck_steps

COSTS = st.floats(1e-4, 1e4)
TIMES = st.floats(1e-3, 1e3)


# The formulas: what is published, and what a formula means.


def test_daly_gives_the_published_interval() -> None:
    assert daly_s(60, 11134.8) == pytest.approx(1116.3, abs=0.05)


@given(cost_s=COSTS, more=st.floats(1, 1e4))
def test_daly_loses_no_more_than_its_neighbours(cost_s: float, more: float) -> None:
    """Daly's exact model: wall time per useful second is M/tau (e^((tau+C)/M) - 1); his formula is its minimum, to the
    orders that it keeps."""
    mtbf_s = cost_s * more * 10

    def wall(tau: float) -> float:
        return mtbf_s / tau * math.expm1((tau + cost_s) / mtbf_s)

    best = daly_s(cost_s, mtbf_s)
    assert wall(best) <= min(wall(best * 1.1), wall(best * 0.9))


def test_daly_saves_once_per_failure_where_a_save_costs_twice_that() -> None:
    assert daly_s(200.0, 100.0) == 100.0
    assert daly_s(500.0, 100.0) == 100.0


def test_checkfreq_and_pccheck_give_the_published_steps() -> None:
    assert checkfreq_steps(12, 0.5, 0.3) == 39
    assert checkfreq_steps(0.1, 0.5, 0.3) == 1
    assert pccheck_steps(10, 2, 1.05, 1) == 5


@given(cost_s=COSTS, step_s=TIMES, overhead=st.floats(0.001, 0.9))
def test_the_steps_for_an_overhead_are_the_fewest_within_it(
    cost_s: float, step_s: float, overhead: float
) -> None:
    steps = overhead_steps(cost_s, step_s, overhead)
    assert cost_s / (steps * step_s) <= overhead * (1 + 1e-6)
    assert steps == 1 or cost_s / ((steps - 1) * step_s) > overhead


def test_a_quotient_that_is_whole_is_not_rounded_up_by_its_last_digit() -> None:
    assert overhead_steps(0.3, 0.1, 1.0) == 3  # 0.3 / 0.1 is 2.9999999999999996, 3 * 0.1 is more
    assert overhead_steps(0.7, 0.1, 1.0) == 7
    assert overhead_steps(0.1 * 3, 0.1, 1.0) == 3


# The choice.


def tier(name: str, kind: TierKind, survives: LossClass, *, every: int = 1) -> TierRules:
    return TierRules(name=name, kind=kind, survives=survives, flush_every=every)


HOST = tier("host", TierKind.HOST, LossClass.PROCESS)
NVME = tier("nvme", TierKind.FILE, LossClass.PROCESS)
STORE = tier("store", TierKind.OBJECT, LossClass.SITE, every=10)


def measured(**more: Any) -> Measured:
    facts: dict[str, Any] = {"step_s": 0.1, "cost_s": 0.14, "saved": True, "images": 2}
    return Measured(**{**facts, **more})


@pytest.mark.parametrize(
    "rules", [CadenceRules(overhead=0.035), CadenceRules(mtbf_s={LossClass.PROCESS: 100.0})]
)
def test_no_measured_interval_is_shorter_than_the_slowest_tier_keeps_up_with(
    rules: CadenceRules,
) -> None:
    rules = CadenceRules(overhead=rules.overhead, mtbf_s=rules.mtbf_s, tiers=(HOST, NVME, STORE))
    slow = measured(durable_s={"nvme": 40.0, "store": 60.0})
    choice = choose_interval(rules, slow)
    q = 1 + (rules.overhead or 0.0)
    assert choice.bound is IntervalBound.DURABLE
    assert choice.interval_steps == math.ceil(40.0 / (2 * q * 0.1)), "the store takes every tenth"
    assert "tier nvme has a save after 40 s, and host memory holds 2" in choice.reason
    one = choose_interval(rules, measured(durable_s={"nvme": 40.0}, images=1))
    assert one.interval_steps == math.ceil(40.0 / (q * 0.1))
    quick = choose_interval(rules, measured(durable_s={"nvme": 1.0}))
    assert quick.bound is not IntervalBound.DURABLE


def test_an_mtbf_is_answered_by_daly_in_steps() -> None:
    rules = CadenceRules(mtbf_s={LossClass.PROCESS: 11134.8, LossClass.SITE: 1e6}, tiers=(HOST,))
    choice = choose_interval(rules, measured(cost_s=60.0, step_s=2.0))
    assert (choice.interval_steps, choice.bound) == (round(1116.3 / 2), IntervalBound.FAILURES)
    assert "a failure every 3 h 06 min" in choice.reason


def test_a_tier_is_not_asked_for_more_than_it_can_take() -> None:
    rules = CadenceRules(mtbf_s={LossClass.PROCESS: 7200.0}, tiers=(HOST, STORE))
    facts = measured(cost_s=2.0, step_s=1.0, durable_s={"store": 900.0})
    store = tier_cadences(rules, facts, 170)[1]
    assert (store.mtbf_s, store.interval_s) == (7200.0, 900.0), "what is not told is taken for less"
    assert "takes a checkpoint in 15 min 00 s" in store.reason
