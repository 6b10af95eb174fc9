"""A drain towards a deadline: what can arrive goes first, what cannot is not begun, and the forecast holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.flush.test_commits import talk
from tests.simulation.many import SHARED_TIER, Many
from tests.simulation.throttled import Throttled
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.tasks import CopyRun, DeleteCopy, LedgerQuery
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.view import ArrivalOutlook
from tierfall.policies.drain import describe_drain

RATE = IMAGE / 10.0
"""An image takes ten seconds."""


def drained(world: Throttled, seconds: float, asker: object = "test") -> Any:
    """Begin a drain, as a Checkpointer does; return its forecast."""
    answer: list[Any] = []
    until_s = world.now_s + seconds
    world.coordinator.post(
        LedgerQuery(
            function=lambda: world.coordinator.drain_schedule.begin(asker, until_s),
            on_answer=lambda value, error: answer.extend((value, error)),
        )
    )
    world.step()
    assert answer[1] is None
    return answer[0]


def throttled(*tiers: str, images: int = 8, **options: Any) -> Throttled:
    """A world whose tiers have shown how fast they are."""
    rules = options.pop("rules", [file_rules(tier, shared=tier == "store") for tier in tiers])
    world = Throttled(
        rules, bytes_per_s=dict.fromkeys(tiers, RATE), memory_images=images, **options
    )
    world.save_all(1)
    return world


def test_the_half_done_copy_goes_first_then_the_newest_and_what_cannot_arrive_is_not_begun() -> (
    None
):
    world = throttled("store")
    for step in (2, 3, 4, 5):
        world.save(step)
    world.go_on(5.0)  # step 2 is half done
    forecast = drained(world, 30.0)
    output = [(d.checkpoint.step, d.outlook) for d in forecast]
    assert output == [
        (2, ArrivalOutlook.ARRIVES),
        (5, ArrivalOutlook.ARRIVES),
        (4, ArrivalOutlook.ARRIVES),
        (3, ArrivalOutlook.TOO_LATE),
    ]
    began: set[int] = set()
    ends_s = world.now_s + 30.0
    while world.now_s < ends_s - 0.01:
        world.go_on(0.25)
        began |= {task.id.step for *_, task in world._due if isinstance(task, CopyRun)}
    assert world.steps_on("store") == [1, 2, 4, 5]
    assert 3 not in began
    lost = "step 3@1 will not be on store: 15.9 KiB are left, 2.5 s at 1.6 kB/s carry 4 KiB"
    assert lost in describe_drain(forecast)
    world.settle()  # the deadline is over: what was held back comes
    assert world.steps_on("store") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_deadline_that_one_rank_knows_of_lets_the_flushes_of_all_yield_to_nobody(
    signalled: int,
) -> None:
    run = Many((0, 1), [file_rules(SHARED_TIER, shared=True, yields=True)], max_wait_s=10.0)
    run.ranks[signalled].coordinator.drain_schedule.share(30.0)
    if signalled == 0:  # it plans for itself as well
        run.ranks[0].coordinator.drain_schedule.begin("signal", run.now_s + 30.0)
    talk(run)
    assert [rank.coordinator.ledger.is_urgent for rank in run.ranks] == [True, True]
    assert [rank.coordinator.drain_schedule.active for rank in run.ranks] == [True, False]
    run.now_s += 31.0
    run.step()
    assert [rank.coordinator.ledger.is_urgent for rank in run.ranks] == [False, False]


def test_a_drain_before_the_end_of_the_process_waits_for_copies_and_not_for_deletions() -> None:
    """A deletion may need another rank, which the signal has ended already."""
    world = World([file_rules("nvme", retain_last=1)])
    for step in (1, 2):
        world.save(step)
    copied, idle = InterruptibleEvent(), InterruptibleEvent()
    world.coordinator.set_when_idle(copied, copies_only=True)
    world.coordinator.set_when_idle(idle)
    world.step()
    assert not copied.is_set
    while not copied.is_set:
        task = next(task for task in world.tasks if not isinstance(task, DeleteCopy))
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    assert world.steps_on("nvme") == [1, 2]
    assert not idle.is_set
    world.settle()
    assert idle.is_set
    assert world.steps_on("nvme") == [2]
