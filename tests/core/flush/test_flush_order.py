"""The order in which a tier that is slower than the saves gets its copies, and which it does not get."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.core.flush.test_commits import talk
from tests.rules import NEWEST_FIRST, SCATTERED
from tests.simulation.many import SHARED_TIER, Many
from tests.simulation.throttled import Throttled
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.flush.tasks import OpenShard
from tierfall.core.types.errors import FlushError
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import CheckpointId, SaveOutcome

COPY_S = 10.0


def slow(*, images: int = 8, **members: Any) -> Throttled:
    """Memory, and a store that takes a copy in ten seconds, the newest first."""
    rules = file_rules("store", shared=True, **{"flush_order": NEWEST_FIRST, **members})
    return Throttled([rules], bytes_per_s={"store": IMAGE / COPY_S}, memory_images=images)


def save_quickly(world: Throttled, *steps: int) -> None:
    """Save these steps a second after one another: all while the first is on its way."""
    for step in steps:
        assert world.save_soon(step) is not None
        world.go_on(1.0)


def arrivals(world: Throttled, *, copies: int) -> list[int]:
    """Let time pass for so many copies, and say in which order checkpoints came."""
    came: list[int] = []
    for _ in range(copies * 4):
        world.go_on(COPY_S / 4)
        came += sorted(set(world.steps_on("store")) - set(came))
    return came


def test_in_an_order_of_ones_own_they_come_as_it_says_also_after_a_kill() -> None:
    """By 5 n mod 7: 3, 2, 5, 1, and 4 comes last; the first is begun while nothing else waits."""
    world = slow(flush_order=SCATTERED)
    save_quickly(world, 1, 2, 3, 4, 5)
    assert arrivals(world, copies=2) == [1, 3]
    world.crash()
    world.start()
    assert arrivals(world, copies=6) == [1, 3, 2, 5, 4]
    world.check("store")
    assert not world.coordinator.busy()


def test_an_older_one_takes_no_room_from_newer_ones() -> None:
    world = slow(capacity_bytes=int(2.5 * IMAGE))
    save_quickly(world, 1, 2, 3, 4)
    assert arrivals(world, copies=8) == [1, 4, 3]
    assert world.steps_on("store") == [3, 4]
    with pytest.raises(FlushError, match="there is no room beside them"):
        world.handles[CheckpointId(2, 1)].wait("store", timeout=0)
    assert not world.coordinator.ledger.failing


@pytest.mark.parametrize("late", [0, 500])
@pytest.mark.parametrize(
    ("order", "first", "gives_up"),
    [(NEWEST_FIRST, [1, 5, 4], True), (SCATTERED, [1, 3, 2], False)],
    ids=["newest_first", "scattered"],
)
def test_all_ranks_bring_what_rank_0_takes_first(
    order: Rule, first: list[int], gives_up: bool, late: int
) -> None:
    rules = file_rules(SHARED_TIER, shared=True, flush_order=order, retain_last=2)
    run = Many((0, 1), [rules], max_wait_s=10.0, memory_images=6)
    for step in (1, 2, 3, 4, 5):
        for rank in run.ranks:
            rank.save(step)
        talk(run)
    begun: list[list[int]] = [[], []]
    draw = random.Random(3)
    for turn in range(2000):
        for rank, seen in zip(run.ranks, begun, strict=True):
            opened = [t.id.step for t in rank.tasks if isinstance(t, OpenShard)]
            seen += [step for step in opened if step not in seen]
            if rank is run.ranks[0] or turn >= late:  # rank 0 may come far ahead
                rank.run_one(draw)
        talk(run)
    run.settle()
    assert begun[0] == begun[1]
    assert begun[0][:3] == first
    lost = [
        {id.step for id, h in rank.handles.items() if h.outcome is SaveOutcome.FAILED}
        for rank in run.ranks
    ]
    assert lost[0] == lost[1]
    assert late or (2 in lost[0]) == gives_up
    assert {id.step for id in run.committed(SHARED_TIER)} == {4, 5}
    for rank in run.ranks:
        assert rank.coordinator.errors == []
        assert not rank.coordinator.busy()
    assert late or (run.ranks[1].door.counts["given_up_copies"][rules.name] > 0) == gives_up
