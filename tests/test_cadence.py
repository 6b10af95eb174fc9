"""The cadence on a virtual clock: it measures what was set, and the interval follows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.training_loop import HOST, STORE, Loop, gaps
from tierfall.core.types.errors import CapacityError
from tierfall.core.types.values import LossClass, SaveOutcome
from tierfall.policies.cadence import PROFILE_STEPS, CadenceRules, daly_s
from tierfall.telemetry.step_timer import STALE_STEPS

TIERS = (HOST, STORE)
OVERHEAD = CadenceRules(overhead=0.035, tiers=TIERS)
# Of Loop's figures: a save blocks 0.25 s; the store has it 1 s later, in the second step, and each of the two takes
# 0.125 s more.
COST_S = 0.25 + 2 * 0.125
STEPS = math.ceil(COST_S / (0.035 * 0.5))


def test_an_overhead_is_measured_to_the_last_digit_and_kept() -> None:
    loop = Loop(OVERHEAD)
    loop.run(200)
    report = loop.cadence.report()
    assert (report.step_s, report.cost_s) == (0.5, COST_S)
    assert (report.interval_steps, report.bound) == (STEPS, "overhead")
    assert report.overhead == pytest.approx(COST_S / (STEPS * 0.5))
    assert report.durable_s == {"store": pytest.approx(1.0 + 0.25, abs=0.26)}
    began_s, began = loop.now_s, loop.step
    saves = loop.run(10 * STEPS)
    assert gaps(saves) == [STEPS] * (len(saves) - 1)
    trained_s = (loop.step - began) * 0.5
    assert (loop.now_s - began_s) / trained_s - 1 <= 0.035
    assert (loop.now_s - began_s) / trained_s - 1 > 0.03
    assert loop.cadence.report().next_step == saves[-1] + STEPS


def test_the_first_save_comes_once_steps_were_measured_and_the_second_tells_the_cost() -> None:
    loop = Loop(OVERHEAD)
    first, second, third = loop.run(100)[:3]
    assert first == 3 + PROFILE_STEPS, (
        "the step that began before, and two that compile, are left out"
    )
    assert second == first + PROFILE_STEPS
    assert third == second + STEPS


def test_an_interval_follows_a_cost_that_doubles_and_comes_back() -> None:
    loop = Loop(OVERHEAD)
    loop.run(300)
    loop.blocked_s, loop.slower_s = 0.5, 0.25
    saves = loop.run(6 * STEPS + 1)
    assert gaps(saves)[0] == STEPS, "one odd save changes nothing"
    assert set(gaps(saves)[1:]) == {math.ceil(2 * COST_S / (0.035 * 0.5))}
    loop.blocked_s, loop.slower_s = 0.25, 0.125
    loop.run(6 * STEPS)
    assert loop.cadence.report().interval_steps == STEPS


@pytest.mark.parametrize("every", [2, 3, 10])
def test_an_overhead_is_kept_where_only_some_saves_go_to_a_tier_that_slows_steps_down(
    every: int,
) -> None:
    tiers = (HOST, replace(STORE, flush_every=every))
    loop = Loop(replace(OVERHEAD, tiers=tiers), flush_every=every, blocked_s=0.125, durable_s=6.0)
    loop.run(40 * STEPS)
    report = loop.cadence.report()
    assert report.cost_s == pytest.approx(0.125 + 0.125 * math.ceil(6.0 / 0.625) / every)
    saves = every * (len(loop.saved) // every + 1)
    loop.run_to(saves)
    began_s, began = loop.now_s, loop.step
    loop.run_to(saves + 3 * every)
    trained_s = (loop.step - began) * 0.5
    assert (loop.now_s - began_s) / trained_s - 1 == pytest.approx(0.035, abs=0.002)
    loop.blocked_s, loop.slower_s = 0.25, 0.25
    loop.run(80 * STEPS)
    report = loop.cadence.report()
    assert report.cost_s == pytest.approx(0.25 + 0.25 * math.ceil(6.0 / 0.75) / every)


def test_an_interval_follows_steps_that_take_longer_and_come_back() -> None:
    loop = Loop(OVERHEAD)
    loop.run(300)
    for step_s in (1.0, 0.5):
        loop.step_s = step_s
        loop.durable_s = 2 * step_s
        loop.run(12 * STEPS)
        assert loop.cadence.report().step_s == step_s
        steps = loop.cadence.report().interval_steps
        assert steps is not None
        assert loop.cadence.report().overhead == pytest.approx(0.035, rel=0.05)


def test_steps_that_get_faster_are_seen_although_a_save_is_always_under_way() -> None:
    loop = Loop(CadenceRules(overhead=0.5, tiers=TIERS), durable_s=9.9, blocked_s=0.5)
    loop.run(600)
    assert all(not handle.is_settled() for handle in loop.handles[-1:])
    loop.step_s = 0.25
    loop.run(1200)
    step_s = loop.cadence.report().step_s
    assert step_s is not None
    assert step_s <= 0.25 + loop.slower_s


def test_steps_beside_copies_that_an_earlier_start_left_are_not_what_a_step_takes() -> None:
    loop = Loop(OVERHEAD, copies_others=True)
    assert loop.run(100) == [3 + PROFILE_STEPS], "the first save waits for no copies, the next does"
    report = loop.cadence.report()
    assert report.bound == "measuring"
    assert "10 steps without a copy in progress are measured before the next save" in report.reason
    loop.copies_others = False
    loop.run(200)
    report = loop.cadence.report()
    assert (report.step_s, report.cost_s) == (0.5, COST_S)
    assert (report.interval_steps, report.bound) == (STEPS, "overhead")


def test_a_copy_that_its_tier_takes_late_is_a_cost_of_the_last_save() -> None:
    """A save is told that its tier is full at the moment, and waits for it no more: the copy comes all the same."""
    loop = Loop(OVERHEAD)
    loop.run(200)
    late = 20
    for _ in range(3):
        loop.run_to(len(loop.saved) + 1)
        loop.handles[-1].on_tier_failed("store", CapacityError("full"))
        loop.run(2)
        loop.copies_others = True
        loop.run(late)
        loop.copies_others = False
    report = loop.cadence.report()
    cost_s = loop.blocked_s + late * loop.slower_s
    assert report.cost_s == pytest.approx(cost_s)
    assert report.interval_steps == math.ceil(cost_s / (0.035 * 0.5))


def test_a_save_costs_no_less_than_its_wait_where_steps_beside_a_late_copy_are_fast() -> None:
    loop = Loop(CadenceRules(mtbf_s={LossClass.PROCESS: 7200.0}, tiers=TIERS))
    loop.run(400)
    costs_s = []
    for _ in range(3):
        loop.run_to(len(loop.saved) + 1)
        loop.run(4)
        loop.copies_others, loop.step_s, loop.slower_s = True, 0.375, 0.0
        for _ in range(20):
            loop.run(1)
            costs_s.append(loop.cadence.report().cost_s or 0.0)
        loop.copies_others, loop.step_s, loop.slower_s = False, 0.5, 0.125
    assert min(costs_s) == loop.blocked_s
    report = loop.cadence.report()
    assert report.interval_steps == round(daly_s(loop.blocked_s, 7200.0) / 0.5)


def test_copies_that_never_end_keep_no_save_off_for_long() -> None:
    loop = Loop(OVERHEAD, copies_others=True)
    first, second, third = loop.run(2 * STALE_STEPS)[:3]
    assert first == 3 + PROFILE_STEPS
    assert STALE_STEPS - first < second - first <= STALE_STEPS + PROFILE_STEPS
    assert third - second <= STEPS
    assert loop.cadence.report().bound == "overhead"


def test_a_free_save_is_made_as_often_as_the_slowest_tier_keeps_up() -> None:
    loop = Loop(OVERHEAD, blocked_s=0.0, slower_s=0.0, durable_s=10.0)
    loop.run(600)
    report = loop.cadence.report()
    assert (report.bound, report.images) == ("durable", 2)
    assert loop.most_under_way == 2, "no save waits for memory"
    rate_s = gaps(loop.saved)[-1] * 0.5
    assert rate_s == pytest.approx(10.0, rel=0.1), "nor does the tier idle"


def test_a_step_that_takes_long_now_and_then_changes_nothing() -> None:
    loop = Loop(OVERHEAD)
    loop.run(300)
    for _ in range(5):
        loop.run(40)
        loop.now_s += 30.0  # an evaluation
    assert loop.cadence.report().interval_steps == STEPS


def test_an_mtbf_is_kept_in_seconds_by_steps() -> None:
    by_class = {LossClass.PROCESS: 7200.0, LossClass.NODE: 8e6}
    loop = Loop(CadenceRules(mtbf_s=by_class, tiers=TIERS))
    loop.run(400)
    report = loop.cadence.report()
    assert (report.bound, report.cost_s) == ("failures", COST_S)
    assert report.interval_steps == round(daly_s(COST_S, 7200.0) / 0.5)
    assert [tier.tier for tier in report.tiers] == ["host", "store"]
    assert report.tiers[1].flush_every == round(daly_s(COST_S, 8e6) / (report.interval_steps * 0.5))
    saves = loop.run(3 * report.interval_steps)
    assert set(gaps(saves)) == {report.interval_steps}


def test_a_time_is_kept_by_the_clock_and_a_pause_is_not_made_up_for() -> None:
    loop = Loop(CadenceRules(every_s=10.0, tiers=TIERS), blocked_s=0.0, slower_s=0.0)
    loop.run(100)
    assert loop.times == [1010.0, 1020.0, 1030.0, 1040.0, 1050.0]
    loop.now_s += 100.0
    loop.run(60)
    assert loop.times[5:] == [1150.5, 1160.5, 1170.5]
    report = loop.cadence.report()
    assert (report.interval_steps, report.bound, report.next_step) == (20, "every", None)


def test_steps_by_number_need_no_clock_and_never_take_step_zero() -> None:
    loop = Loop(CadenceRules(every_steps=4, tiers=TIERS), step=-1)
    assert loop.run(10) == [4, 8]
    assert loop.cadence.report().next_step == 12


def test_a_signal_saves_the_next_step_once_whatever_the_interval_is() -> None:
    for rules in (OVERHEAD, CadenceRules(every_steps=1000), CadenceRules(every_s=1e6)):
        loop = Loop(rules)
        loop.run(5)
        loop.cadence.request("SIGUSR1")
        assert loop.run(5) == [6]


def test_loops_that_ask_every_tenth_step_are_measured_alike() -> None:
    loop = Loop(OVERHEAD)
    loop.run(100, stride=10)
    report = loop.cadence.report()
    assert (report.step_s, report.bound) == (0.5, "overhead")
    assert set(gaps(loop.saved[2:])) == {-(-(report.interval_steps or 0) // 10) * 10}


def test_saves_of_the_users_own_put_the_next_one_off() -> None:
    loop = Loop(OVERHEAD)
    loop.run(200)
    due = loop.cadence.report().next_step
    assert due is not None
    loop.run(due - loop.step - 1)
    loop.save()
    assert loop.run(STEPS) == [loop.step]


def test_a_skipped_save_costs_what_was_waited_for_it() -> None:
    loop = Loop(OVERHEAD)
    loop.run(200)
    loop.blocked_s = 5.0
    for _ in range(2):
        loop.save()
        loop.handles[-1].on_given_up(SaveOutcome.SKIPPED, CapacityError("full"))
        loop.run(3)
    assert loop.cadence.report().cost_s == pytest.approx(5.0, abs=0.2)


def test_the_second_save_waits_for_the_first_and_not_for_ever() -> None:
    loop = Loop(OVERHEAD, durable_s=20.0)
    first, second = loop.run(100)[:2]
    assert second - first == 40, "the first was through then"
    stuck = Loop(OVERHEAD, durable_s=1e9)
    first, second = stuck.run(400)[:2]
    assert second - first == PROFILE_STEPS + 100


# ETTR.


def test_ettr_is_the_share_of_time_that_made_progress_which_is_kept() -> None:
    loop = Loop(CadenceRules(every_steps=20, tiers=TIERS))
    assert loop.cadence.ettr() is None
    loop.now_s += 10.0  # a restore
    loop.run(110)
    saves = 5
    wall_s = 10.0 + 110 * 0.5 + saves * COST_S
    assert loop.now_s == pytest.approx(1000.0 + wall_s)
    assert loop.cadence.ettr() == pytest.approx(110 * 0.5 / wall_s)


def test_what_is_gone_back_over_is_no_progress() -> None:
    loop = Loop(CadenceRules(every_steps=20, tiers=TIERS))
    loop.run(110)
    before_s = loop.now_s
    loop.now_s += 7.0
    loop.step = 100
    loop.cadence.continue_from(100)
    loop.run(5)
    wall_s = before_s - 1000.0 + 7.0 + 5 * 0.5
    assert loop.cadence.ettr() == pytest.approx((100 + 5) * 0.5 / wall_s)
    loop.step = 0
    loop.cadence.continue_from(None)
    loop.run(10)
    wall_s += 10 * 0.5
    assert loop.cadence.ettr() == pytest.approx(10 * 0.5 / wall_s)


def test_after_going_back_the_interval_goes_on_from_there() -> None:
    loop = Loop(OVERHEAD)
    loop.run(300)
    loop.step = 150
    loop.cadence.continue_from(150)
    assert loop.run(2 * STEPS) == [150 + STEPS, 150 + 2 * STEPS]


def test_a_second_save_comes_though_steps_are_seen_by_fifties_beside_what_an_earlier_start_left() -> (
    None
):
    """So many steps without one that shows what it takes alone: those beside copies have to do."""
    loop = Loop(OVERHEAD)
    loop.run(3 + 5, stride=50)
    loop.copies_others = True
    loop.run(6, stride=50)
    assert len(loop.saved) == 1
    loop.run(10, stride=50)
    assert len(loop.saved) >= 2, loop.cadence.report()
