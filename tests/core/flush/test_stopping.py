"""A coordinator that stops, by its own error or at the end, answers all waiters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.many import SHARED_TIER, Many
from tests.simulation.rank import CUT
from tests.simulation.world import World, file_rules
from tierfall.core.flush.tasks import Command, CommandKind, LedgerQuery
from tierfall.core.types.errors import CaptureError, TierfallError
from tierfall.core.types.values import CheckpointId, SaveOutcome

STOPPED = TierfallError("stopped on purpose")


def given(handle: Any) -> BaseException:
    with pytest.raises(TierfallError, match="stopped on purpose") as raised:
        handle.wait(timeout=0)
    return raised.value


def test_every_handle_is_notified() -> None:
    world = World([file_rules("nvme")], memory_images=3)
    done = world.save(1)
    world.settle()
    owed = world.save(2)
    region, _ = world.ask_for_region(3)
    capturing = world.begin(3, region).handle
    world.step()
    world.coordinator.stop(STOPPED)
    done.wait(timeout=0)
    given(owed)
    given(capturing)
    with pytest.raises(TierfallError, match="stopped on purpose"):
        capturing.captured(timeout=0)
    owed.captured(timeout=0)  # it is sealed all the same


def test_what_is_asked_before_and_after_is_answered() -> None:
    world = World([file_rules("nvme")], memory_images=1)
    world.save(1)
    answers: list[Any] = []

    def ask() -> None:
        world.coordinator.post(
            LedgerQuery(function=int, on_answer=lambda *words: answers.append(words))
        )
        world.coordinator.post(
            Command(
                kind=CommandKind.DELETE,
                id=CheckpointId(1, 1),
                on_answer=lambda failed: answers.append(failed),
            )
        )

    waiting = world.ask_for_region(2)
    assert waiting == []
    ask()
    world.coordinator.stop(STOPPED)
    assert waiting == [None, STOPPED]
    ask()
    assert answers == [(None, STOPPED), {"tierfall": STOPPED}] * 2
    late = world.begin(3, world.memory.regions[0])
    assert late.handle.outcome is SaveOutcome.FAILED
    given(late.handle)


def test_at_the_end_of_a_training_what_not_all_ranks_began_to_save_is_given_up_and_nothing_else() -> (
    None
):
    """Rank 2 still captures step 2, and has not begun to save step 3."""
    run = Many((0, 0, 1), [file_rules(SHARED_TIER, shared=True)], max_wait_s=600.0)
    *others, last = run.ranks
    for rank in others:
        rank.save(2)
        rank.save(3)
    region, _ = last.ask(2)
    capture = last.begin(2, region)
    run.settle(limit_s=30.0)
    second, third = CheckpointId(2, 1), CheckpointId(3, 1)
    for rank in run.ranks:
        rank.coordinator.seals.end_saves(second)
    run.settle(limit_s=30.0)
    for rank in others:
        with pytest.raises(CaptureError, match="rank 2 did not save step 3 before the training"):
            rank.handles[third].wait(timeout=0)
        assert rank.handles[second].exception() is None
    last.advance(capture, CUT.chunk_count)
    run.settle(limit_s=30.0)
    assert all(rank.handles[second].done(SHARED_TIER) for rank in run.ranks)
    assert run.committed(SHARED_TIER) == {second}
