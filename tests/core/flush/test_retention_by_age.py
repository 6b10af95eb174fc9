"""Retention by age while nothing is saved."""

from __future__ import annotations

import pytest

from tests.rules import young
from tests.simulation.world import World, file_rules
from tierfall.core.types.values import CheckpointId

HOUR_S = 3600.0


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
    world.settle(limit_s=HOUR_S - 21.0)
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    due = world.step()
    assert due is not None
    assert HOUR_S < due < HOUR_S + 0.1
    world.now_s = due
    world.settle(limit_s=0.0)
    assert world.steps_on("nvme") == [2, 3, 4]
    assert world.step() == pytest.approx(HOUR_S + 10, abs=0.1)


def test_a_run_that_waits_for_nothing_but_time_is_idle() -> None:
    world = aged()
    assert world.step() is not None
    assert not world.coordinator.busy()


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
    next_s = world.step()
    assert next_s is None or next_s > world.now_s, "it is woken in vain"


def test_what_lies_there_at_a_start_ages_by_when_it_was_saved() -> None:
    world = aged()
    world.crash()
    world.now_s = HOUR_S + 15
    world.start()
    world.step()
    world.run_all()
    assert world.steps_on("nvme") == [1, 2, 3, 4], "it goes before this start knows what is good"
    world.started_from = CheckpointId(4, 1)
    world.coordinator.ledger.continue_from(world.started_from, attempt=2)
    world.settle(limit_s=1.0)
    assert world.steps_on("nvme") == [1, 2, 3, 4], "of the last two verified it has only one"
    world.save(5)
    world.settle(limit_s=1.0)
    assert world.steps_on("nvme") == [3, 4, 5]
