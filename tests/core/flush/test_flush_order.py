"""The order in which a tier that is slower than the saves gets its copies, and which it does not get."""

from __future__ import annotations

import random

import pytest

from tests.core.flush.test_commits import talk
from tests.rules import NEWEST_FIRST, SCATTERED
from tests.simulation.many import SHARED_TIER, Many
from tests.simulation.world import file_rules
from tierfall.core.flush.tasks import OpenShard
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import SaveOutcome


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
