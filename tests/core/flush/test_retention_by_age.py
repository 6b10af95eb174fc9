"""Retention by age while nothing is saved."""

from __future__ import annotations

import pytest

from tests.rules import young
from tests.simulation.world import World, file_rules

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
