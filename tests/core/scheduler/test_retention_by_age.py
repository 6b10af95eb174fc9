"""Retention by age while nothing is saved."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.rules import best, last, young
from tests.simulation.wants import metrics_of
from tests.simulation.world import World, file_rules
from tierfall.core.runtime.retries import FIRST_S
from tierfall.core.scheduler.deletion.planner import WAIT_MAX_S
from tierfall.core.scheduler.ledger.tasks import ReadMarks
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.marks import Marks

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def aged(seconds: float = HOUR_S) -> World:
    """A run that has saved steps 1 to 4 at 0, 10, 20 and 20 seconds, and keeps what is younger than ``seconds``."""
    world = World([file_rules("nvme", retain=(young(seconds),))], memory_images=5)
    for step in (1, 2, 3, 4):
        world.now_s = 10.0 * (min(step, 3) - 1)
        world.save(step)
        world.run_all()
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    return world


def test_a_copy_goes_when_it_is_too_old_though_nothing_is_saved() -> None:
    world = aged()
    due = world.step()
    assert due == pytest.approx(HOUR_S, abs=0.1)
    assert due > HOUR_S
    world.now_s = due
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [2, 3, 4]
    assert world.step() == pytest.approx(HOUR_S + 10, abs=0.1)


def test_it_does_not_go_a_moment_before() -> None:
    world = aged()
    world.now_s = HOUR_S - 0.01
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [1, 2, 3, 4]


def test_the_last_two_stay_however_old_and_nothing_is_waited_for_then() -> None:
    world = aged()
    world.settle(limit_s=10 * HOUR_S)
    assert world.steps_on("nvme") == [3, 4]
    assert world.step() is None
    assert not world.coordinator.busy()


def test_a_run_that_waits_for_nothing_but_time_is_idle() -> None:
    world = aged()
    assert world.step() is not None
    assert not world.coordinator.busy()


def test_a_sleep_of_years_is_cut_into_days() -> None:
    world = aged(seconds=10_000 * DAY_S)
    due = world.step()
    assert due is not None
    assert due == pytest.approx(20 + WAIT_MAX_S, abs=1)
    world.now_s = due
    assert not world.tasks
    assert world.step() == pytest.approx(due + WAIT_MAX_S, abs=1)
    assert not any(isinstance(task, ReadMarks) for task in world.tasks)


def test_the_step_of_a_rule_without_time_waits_for_nothing() -> None:
    world = World([file_rules("nvme", retain=(last(1), best("loss")))])
    world.save(1)
    world.run_all()
    assert world.step() is None


def test_while_a_restore_reads_nothing_goes_and_after_it_it_does() -> None:
    world = aged()
    world.coordinator.deleter.set_paused(True)
    world.now_s = HOUR_S + 1
    assert world.step() is None
    world.run_all()
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    world.coordinator.deleter.set_paused(False)
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [2, 3, 4]


def test_what_is_read_when_it_becomes_too_old_goes_right_after_that() -> None:
    world = aged()
    first = world.coordinator.ledger.entries[CheckpointId(1, 1)]
    first.lease("nvme", +1)
    for seconds in (1.0, 60.0):
        world.now_s = max(world.now_s, HOUR_S) + seconds
        world.step()
        world.run_all()
    assert world.steps_on("nvme") == [1, 3, 4], "it goes while it is read"
    first.lease("nvme", -1)
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [3, 4]
    assert world.step() is None


def test_marks_that_could_not_be_read_are_read_again_without_a_commit() -> None:
    world = aged()
    world.now_s = HOUR_S + 100  # nothing more comes to be too old after that
    unreachable = UnreachableError("on purpose")
    with mock.patch.object(Marks, "of", side_effect=unreachable) as marks:
        world.step()
        world.run_all()
    assert marks.call_count == 1
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    world.now_s += FIRST_S
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [3, 4]


def test_what_lies_there_at_a_start_ages_by_when_it_was_saved() -> None:
    world = aged()
    world.crash()
    world.now_s = HOUR_S + 15
    world.start()
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [1, 2, 3, 4], "it goes before this start knows what is good"
    world.coordinator.ledger.continue_from(CheckpointId(4, 1), attempt=2)
    world.settle(limit_s=1.0)
    assert world.steps_on("nvme") == [3, 4]


def test_a_clock_that_is_set_back_on_the_wall_counts_from_the_start_alone() -> None:
    world = aged()
    ledger = world.coordinator.ledger
    ledger.set_clock(now_s=world.now_s, wall_time_s=1.7e9)
    world.now_s += 5
    world.step()
    assert ledger.view().wall_time_s == 1.7e9 + 5


def test_the_best_by_the_metric_that_was_saved_stays() -> None:
    world = World([file_rules("nvme", retain=(best("loss"),))], memory_images=2)
    steps = range(1, 13)
    for step in steps:
        world.save(step)
        world.run_all()
    losses = {s: metrics_of(CheckpointId(s, 1)).get("loss") for s in steps}
    measured = {s: loss for s, loss in losses.items() if loss is not None and loss == loss}
    chosen = min(measured, key=lambda s: (measured[s], -s))
    assert chosen != 12, "the drawn metrics make no case of it"
    assert world.steps_on("nvme") == [chosen, 12]
