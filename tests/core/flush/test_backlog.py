"""Whether a tier keeps up: the forecast, its reports, and bounds in time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.core.flush.test_commits import talk
from tests.simulation.many import SHARED_TIER, Many
from tests.simulation.throttled import Throttled
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.units import format_count

EVERY_S = 10.0


def world_of(copy_s: float, *, images: int = 12, **members: Any) -> Throttled:
    """A store that takes a copy in so many seconds; saves are ten seconds apart."""
    rules = file_rules("store", shared=True, **members)
    return Throttled([rules], bytes_per_s={"store": IMAGE / copy_s}, memory_images=images)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# The forecast ----------------------------------------------------------------------------------------


def test_a_tier_that_falls_behind_is_reported_once_and_early(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = world_of(copy_s=12.5)  # it takes four where five come
    said_at = None
    for step in range(1, 13):
        world.save_soon(step)
        world.go_on(EVERY_S)
        if said_at is None and warnings(caplog):
            said_at = step
    assert said_at is not None
    assert said_at <= 10, "it comes early: memory for twelve images is not full before the sixtieth"
    assert [m for m in warnings(caplog) if "at this cadence" in m] == [warnings(caplog)[0]]
    behind = world.coordinator.backlog.behind["store"]
    assert behind == pytest.approx(3600 / EVERY_S - 3600 / 12.5, rel=0.02)
    assert f"store is {format_count(behind)} checkpoints behind in an hour" in warnings(caplog)[0]


# In time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_save_that_another_rank_lost_is_not_missed(comes_first: bool) -> None:
    run = Many((0, 1), [file_rules(SHARED_TIER, shared=True, within_s=60.0)], max_wait_s=600.0)
    saves, fails = run.ranks
    if comes_first:
        saves.save(1)
    region, _ = fails.ask(1)
    fails.fail_capture(fails.begin(1, region), CaptureError("on purpose"))
    talk(run)
    if not comes_first:
        saves.save(1)
    run.settle(limit_s=10.0)
    run.now_s += 61.0
    run.step()
    for rank in run.ranks:
        assert rank.coordinator.backlog.behind_s(SHARED_TIER, run.now_s) == 0.0
        assert rank.coordinator.backlog.late == {}


def test_of_several_ranks_rank_0_alone_says_it(caplog: pytest.LogCaptureFixture) -> None:
    rules = file_rules(SHARED_TIER, shared=True, within_s=60.0)
    run = Many((0, 1), [rules], max_wait_s=600.0)
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    run.now_s += 61.0
    run.step()
    assert [rank.coordinator.backlog.late for rank in run.ranks] == [{SHARED_TIER: 1}] * 2
    assert len([m for m in warnings(caplog) if "flush.within" in m]) == 1
