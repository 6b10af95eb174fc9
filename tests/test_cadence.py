"""The cadence on a virtual clock: it measures what was set, and the interval follows. Asking for it costs next to
nothing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import tierfall
from tests.steps import state_of
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.values import CheckpointId, LossClass, TierKind, survives
from tierfall.core.types.view import TierRules
from tierfall.policies.cadence import PROFILE_STEPS, CadenceRules
from tierfall.policies.formulas import daly_s
from tierfall.run.cadence import CadenceClock
from tierfall.telemetry.step_timer import STALE_STEPS

HOST = TierRules(name="host", kind=TierKind.HOST, survives=survives(TierKind.HOST, shared=False))
STORE = TierRules(
    name="store", kind=TierKind.OBJECT, survives=survives(TierKind.OBJECT, shared=True)
)


@dataclass
class Loop:
    """Steps take ``step_s``; a save blocks for ``blocked_s``, a tier has it after ``durable_s`` seconds, and each step
    until then takes ``slower_s`` more. Saves wait for the tier one after the other. While ``copies_others``, a tier is
    taking what no save of this loop has made, and steps are slower too."""

    rules: CadenceRules
    step_s: float = 0.5
    blocked_s: float = 0.25
    durable_s: float = 1.0
    slower_s: float = 0.125
    images: int = 2
    copies_others: bool = False
    now_s: float = 1000.0
    step: int = 0
    saved: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    handles: list[SaveHandle] = field(default_factory=list)
    most_under_way: int = 0
    _due: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cadence = CadenceClock(
            self.rules,
            clock=lambda: self.now_s,
            images=lambda image_bytes: self.images,
            copying=lambda: self.copies_others,
            began_s=self.now_s,
            wall_time=lambda: self.now_s,
        )

    def run(self, steps: int) -> list[int]:
        """Train so many steps; return the steps that were saved meanwhile."""
        before = len(self.saved)
        for _ in range(steps):
            self._train()
            if self.cadence.is_due(self.step):
                self.save()
        return self.saved[before:]

    def _train(self) -> None:
        under_way = self.copies_others or any(not h.is_settled() for h in self.handles)
        self.now_s += self.step_s + (self.slower_s if under_way else 0.0)
        self.step += 1
        for handle in self.handles:
            if self._due.get(handle.step, math.inf) <= self.now_s and not handle.done("store"):
                handle.on_committed("store")

    def save(self) -> None:
        """Save here and now, as a call of ``save`` does."""
        handle = SaveHandle(
            CheckpointId(self.step, 1),
            ("store",),
            in_memory="host",
            clock=lambda: self.now_s,
        )
        self.now_s += self.blocked_s
        handle.on_begun(bytes=1000, lazy=True, blocked_s=self.blocked_s)
        handle.on_captured()
        last_s = max(self._due.values(), default=0.0)
        self._due[self.step] = max(self.now_s, last_s) + self.durable_s
        self.handles.append(handle)
        self.saved.append(self.step)
        self.times.append(self.now_s)
        under_way = sum(not handle.is_settled() for handle in self.handles)
        self.most_under_way = max(self.most_under_way, under_way)
        self.cadence.on_saved(handle)


def gaps(steps: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(steps)]


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


def test_the_ettr_of_a_run_counts_all_its_starts_what_they_lost_and_the_time_between() -> None:
    rules = CadenceRules(every_steps=20, tiers=TIERS)
    first = Loop(rules)
    first.run(100)
    saved = first.cadence.progress()  # of the checkpoint at step 100, whose cost is still to come
    first.run(15)  # lost
    second = Loop(rules, now_s=first.now_s + 60.0, step=100)
    second.cadence.continue_from(100, earlier=saved)
    second.run(50)
    wall_s = second.now_s - 1000.0
    kept_s = 150 * 0.5
    assert second.cadence.run_ettr() == pytest.approx(kept_s / wall_s, rel=0.01)
    second.step = 100
    second.cadence.continue_from(
        100, earlier=saved
    )  # it goes back itself, and loses all it has done
    second.run(10)
    assert second.cadence.run_ettr() == pytest.approx(110 * 0.5 / (wall_s + 10 * 0.5), rel=0.01)
    third = Loop(rules, step=110)
    third.cadence.continue_from(110)  # from a checkpoint that does not know it
    third.run(50)
    assert third.cadence.run_ettr() is None
    assert third.cadence.ettr() is not None


def test_what_was_measured_survives_a_restart() -> None:
    first = Loop(OVERHEAD)
    first.run(400)
    second = Loop(OVERHEAD, step=400)
    second.cadence.continue_from(400, earlier=first.cadence.progress())
    assert second.cadence.report().cost_s == first.cadence.report().cost_s
    assert second.run(2 * STEPS) == [400 + STEPS, 400 + 2 * STEPS], "nothing is measured anew first"
    second.step_s *= 2  # on another machine
    second.run(400)
    assert gaps(second.saved)[-1] < STEPS


# What it costs --------------------------------------------------------------------------------------


MakeConfig = Callable[..., dict[str, Any]]


def test_a_step_that_is_not_saved_costs_microseconds(make_config: MakeConfig) -> None:
    for interval in ({"every": 10**9}, {"every": "10d"}, {"overhead": "0.0001%"}):
        with tierfall.open(
            {**make_config(run=f"r{len(interval)}"), "interval": {**interval, "at_end": False}}
        ) as ckpt:
            state = state_of(0)
            best_s = float("inf")
            for batch in range(40):
                began_s = time.thread_time()  # what others do on this machine is not its time
                for step in range(1000):
                    ckpt.maybe_save(batch * 1000 + step, state)
                best_s = min(best_s, (time.thread_time() - began_s) / 1000)
                if best_s < 20e-6:
                    break
        print(f"{interval}: {best_s * 1e6:.2f} us")
        assert best_s < 20e-6
