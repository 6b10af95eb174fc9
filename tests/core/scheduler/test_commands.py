"""A person's commands and concurrent events: no promise to the person is undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.many import NODE_TIER, Many
from tests.simulation.world import IMAGE, World, file_rules, images_of
from tierfall.core.format.records import Mark
from tierfall.core.scheduler.ledger.tasks import (
    ChangeMark,
    Command,
    CommandKind,
    DeleteCopy,
    ReadMarks,
    Task,
)
from tierfall.core.types import events, keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import FlushError, StepError
from tierfall.core.types.values import CheckpointId, SaveOutcome

FIRST = CheckpointId(1, 1)
Answer = list[dict[str, BaseException]]


def give(world: World, kind: CommandKind, id: CheckpointId) -> Answer:
    """Give an order, and carry out no task yet."""
    answer: Answer = []
    world.coordinator.post(Command(kind=kind, id=id, wall_time_s=0.0, on_answer=answer.append))
    world.step()
    return answer


def carry_out(world: World, kind: type[Task], **members: object) -> None:
    """Carry out the first waiting task of that kind, before all others."""
    task = next(
        t
        for t in world.tasks
        if isinstance(t, kind) and all(getattr(t, k) == v for k, v in members.items())
    )
    world.tasks.remove(task)
    world.coordinator.post(world.runner.run(task))
    world.step()


def until(world: World, condition: Callable[[], bool]) -> None:
    while not condition():
        assert world.run_one()


def waiting(world: World, kind: type[Task]) -> bool:
    return any(isinstance(task, kind) for task in world.tasks)


def test_a_pin_is_not_lost_to_marks_that_were_read_before_it_was_written() -> None:
    world = World([file_rules("nvme", retain_last=1)])
    world.save(1)
    world.settle()
    world.save(2)
    until(world, lambda: waiting(world, ReadMarks))
    answer = give(world, CommandKind.PIN, FIRST)
    carry_out(world, ReadMarks)  # it does not know of the pin
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [1, 2]
    assert world.stores["nvme"].marks(FIRST) == {"pin"}


def test_a_pin_that_comes_too_late_is_refused() -> None:
    world = World([file_rules("nvme", retain_last=1)], memory_images=1)
    world.save(1)
    world.settle()
    region, _ = world.ask_for_region(2)
    world.seal(world.begin(2, region))
    world.step()
    until(world, lambda: waiting(world, DeleteCopy))
    (failed,) = give(world, CommandKind.PIN, FIRST)
    assert isinstance(failed["tierfall"], StepError)
    assert "just being dropped" in str(failed["tierfall"])
    world.settle()
    assert world.steps_on("nvme") == [2]


def test_a_pin_wins_over_a_tombstone_until_it_is_taken_away_and_all_ends_in_peace() -> None:
    world = World([file_rules("nvme", retain_last=1), file_rules("store", retain_last=1)])
    world.save(1)
    world.settle()
    for tier, name in (("nvme", "pin"), ("store", "pin"), ("store", "tombstone")):
        world.stores[tier].add_mark(Mark(name=name, checkpoint=FIRST, wall_time_s=0.0))
    for step in (2, 3):
        world.save(step)
        world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [1, 3]
    assert not world.coordinator.busy()
    world.order(CommandKind.UNPIN, FIRST)
    world.save(4)
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [4]


@pytest.mark.parametrize("how", ["deleted", "abandoned"])
def test_whoever_waits_for_a_copy_that_is_given_up_is_notified(how: str) -> None:
    world = World([file_rules("nvme")])
    first = world.save(1)
    world.settle()
    second = world.save(2)
    if how == "deleted":
        give(world, CommandKind.DELETE, CheckpointId(2, 1))
    else:
        world.take_new_attempt()
        world.started_from = FIRST
        world.coordinator.lanes["nvme"].give_up(FlushError("on purpose"))
        while world.tasks:
            world.run_one()
        world.save(3)
    world.settle()
    assert first.outcome is SaveOutcome.SAVED
    assert second.outcome is SaveOutcome.FAILED
    with pytest.raises(FlushError, match=how):
        second.wait(timeout=0)


# Tombstones that others left -------------------------------------------------------------------------


def leave_tombstone(world: World, tier: str, id: CheckpointId = FIRST) -> None:
    """What ``tierfall rm`` does beside a living trainer."""
    world.stores[tier].add_mark(Mark(name="tombstone", checkpoint=id, wall_time_s=0.0))


def test_a_tombstone_that_goes_with_a_copy_before_it_was_read_still_counts() -> None:
    """Room was needed on its tier, and nobody had read the marks since."""
    world = World([file_rules("nvme", retain_last=1), file_rules("store")])
    world.save(1)
    world.settle()
    world.save(2)
    until(world, lambda: waiting(world, DeleteCopy))
    leave_tombstone(world, "nvme")
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [2]
    assert [id.step for id, _ in images_of(world.memory)] == [2]


def test_a_tombstone_that_cannot_be_spread_holds_all_copies_until_it_can() -> None:
    """It must not go with the first copy: a crash before the last would bring the checkpoint back."""
    marking = Fault(
        kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, keys="*tombstone*", times=2
    )

    def wrap(name: str, inner: Backend) -> Backend:
        return Faulty(inner, seed=0, plan=[marking]) if name == "store" else inner

    world = World([file_rules("nvme"), file_rules("store")], wrap=wrap)
    for step in (1, 2):
        world.save(step)
        world.settle()
    leave_tombstone(world, "nvme")
    world.coordinator.deleter.plan_all_tiers()
    rounds = 0
    world.step()
    while world.run_one():
        rounds += 1
        assert rounds < 100, "the scheduler goes round and round"
    assert world.steps_on("nvme") == world.steps_on("store") == [1, 2]
    assert not world.coordinator.busy()
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [2]
    assert world.now_s == 60.0


# Marks in memory, and drops that had failed ----------------------------------------------------------


def dropped(world: World) -> list[events.Dropped]:
    return [event for event in world.lives[-1].events if isinstance(event, events.Dropped)]


def test_a_pin_that_comes_between_the_tombstone_and_the_drop_keeps_that_copy_and_is_reported() -> (
    None
):
    world = World([file_rules("nvme")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    answer = give(world, CommandKind.DELETE, FIRST)
    until(world, lambda: waiting(world, DeleteCopy))
    world.stores["nvme"].add_mark(Mark(name="pin", checkpoint=FIRST, wall_time_s=0.0))
    world.settle()
    assert isinstance(answer[0]["nvme"], StepError)
    assert "is pinned on nvme" in str(answer[0]["nvme"])
    assert world.steps_on("nvme") == [1, 2]


# Two things at once ----------------------------------------------------------------------------------


def work_on(world: World, tier: str) -> None:
    """Carry out all tasks of one tier, and none of the others."""
    while any(task.tier == tier for task in world.tasks):
        task = next(task for task in world.tasks if task.tier == tier)
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()


def test_no_copy_goes_before_every_copy_bears_the_tombstone() -> None:
    """A crash after the first would bring the others back, though the person was told that it is done."""
    world = World([file_rules("nvme"), file_rules("store")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    answer = give(world, CommandKind.DELETE, FIRST)
    work_on(world, "nvme")
    assert world.steps_on("nvme") == [1, 2]
    world.crash()
    world.start()
    world.settle()
    assert answer == []
    assert world.steps_on("nvme") == world.steps_on("store") == [2]


def test_no_deletion_takes_anything_away_while_a_restore_reads() -> None:
    world = World([file_rules("nvme")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    world.coordinator.deleter.set_paused(True)
    answer = give(world, CommandKind.DELETE, FIRST)
    world.settle()
    assert answer == []
    assert world.stores["nvme"].marks(FIRST) == {"tombstone"}
    assert world.steps_on("nvme") == [1, 2]
    assert len(world.memory.regions) == 2
    world.coordinator.deleter.set_paused(False)
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [2]


def test_a_deletion_waits_for_what_leaves_because_of_the_checkpoint_that_it_takes() -> None:
    """Room is made by dropping the older one, since the newer one is there: one after the other, not both at once."""
    world = World([file_rules("nvme", capacity_bytes=int(2.5 * IMAGE))])
    for step in (1, 2):
        world.save(step)
        world.settle()
    world.save(3)
    assert waiting(world, DeleteCopy)
    answer = give(world, CommandKind.DELETE, CheckpointId(2, 1))
    assert [t.id for t in world.tasks if isinstance(t, DeleteCopy)] == [FIRST]
    carry_out(world, ChangeMark)
    assert [t.id for t in world.tasks if isinstance(t, DeleteCopy)] == [FIRST]
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [3]


def test_a_deletion_is_not_finished_while_a_tier_could_not_be_read() -> None:
    """It may have a copy without the mark: with the last tombstone gone, the checkpoint would come back from there."""
    world = World([file_rules("nvme"), file_rules("store")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    leave_tombstone(world, "nvme")
    world.crash()
    world.start(unread=("store",))
    world.settle()
    assert world.steps_on("nvme") == [1, 2]
    failed = world.order(CommandKind.DELETE, CheckpointId(1, 1))
    assert "could not be read when the run was opened" in str(failed["store"])
    world.crash()
    world.start()
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [2]


def test_a_pin_found_in_memory_alone_is_written_to_the_tier_by_the_next_start() -> None:
    """The tier could not be listed when the pin was requested: only memory has it, and is lost with the machine."""
    world = World([file_rules("nvme", retain_last=1)])
    world.save(1)
    world.settle()
    world.crash()
    world.start(unread=["nvme"])
    assert give(world, CommandKind.PIN, FIRST) == [{}]
    world.crash()
    world.start()
    world.settle()
    world.crash()
    world.memory.regions.clear()
    world.start()
    for step in (2, 3, 4):
        world.save(step)
        world.settle()
    assert world.steps_on("nvme") == [1, 4]


def unpin_from_outside(world: World, *tiers: str) -> None:
    """A person's unpin beside the trainer, from a process that cannot write its memory."""
    for tier in tiers:
        world.stores[tier].remove_mark(FIRST, keys.PIN_MARK)


def save_three_more(world: World) -> None:
    for step in (2, 3, 4):
        world.save(step)
        world.settle()


def test_an_unpin_from_outside_is_not_undone_by_the_pin_that_memory_kept() -> None:
    world = World([file_rules("nvme", retain_last=1), file_rules("store", retain_last=1)])
    world.save(1)
    world.settle()
    assert world.order(CommandKind.PIN, FIRST) == {}
    unpin_from_outside(world, "nvme", "store")
    for _ in range(2):  # the trainer dies before it reads the marks
        world.crash()
        world.start()
        world.settle()
    assert world.stores["nvme"].marks(FIRST) == world.stores["store"].marks(FIRST) == frozenset()
    save_three_more(world)
    assert world.steps_on("nvme") == world.steps_on("store") == [4]


def test_a_pin_on_one_tier_holds_while_a_person_has_removed_it_from_the_other() -> None:
    world = World([file_rules("nvme", retain_last=1), file_rules("store", retain_last=1)])
    world.save(1)
    world.settle()
    assert world.order(CommandKind.PIN, FIRST) == {}
    unpin_from_outside(world, "nvme")  # the other tier did not answer, and the person was told
    world.crash()
    world.start()
    save_three_more(world)
    assert world.steps_on("nvme") == world.steps_on("store") == [1, 4]
    unpin_from_outside(world, "nvme", "store")
    world.crash()
    world.start()
    world.save(5)
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [5]


def test_an_unpin_from_outside_holds_on_every_rank() -> None:
    run = Many((0, 1), [file_rules(NODE_TIER)])
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    answer = run.ranks[0].order(CommandKind.PIN, FIRST)
    run.settle()
    assert answer == [{}]
    for rank in run.ranks:
        rank.stores[NODE_TIER].remove_mark(FIRST, keys.PIN_MARK)
    for _ in range(2):
        run.crash()
        run.start()
        run.settle()
        assert not any(rank.coordinator.ledger.entries[FIRST].pinned for rank in run.ranks)
    for disk in run.disks(NODE_TIER).values():
        assert not [key for key in disk._objects if key.endswith(f"/{keys.PIN_MARK}")]
