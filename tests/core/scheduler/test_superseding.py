"""Several snapshots in progress, and which of them a save supersedes when memory is full."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.simulation.world import World, file_rules
from tierfall.backends.object.writers import BufferedWriter
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.format.records import Mark
from tierfall.core.scheduler.ledger.tasks import (
    Command,
    CommandKind,
    CommitCopy,
    CopyRun,
    DeleteCopy,
    FinishCopy,
    Outcome,
    Task,
)
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    AccessDeniedError,
    CapacityError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Codec, SaveOutcome, WhenFull

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(2, 1)


def refuse(*args: Any) -> None:
    raise AccessDeniedError("on purpose")


def silent(*args: Any) -> None:
    raise UnreachableError("on purpose")


def superseding(*rules: Any, images: int = 2, **options: Any) -> World:
    return World(
        rules or [file_rules("nvme")],
        memory_images=images,
        max_wait_s=5.0,
        when_full=WhenFull.SUPERSEDE,
        **options,
    )


def carry_out(world: World, fits: Callable[[Task], bool]) -> Task:
    """Carry out the first waiting task that fits."""
    task = next(task for task in world.tasks if fits(task))
    world.tasks.remove(task)
    world.coordinator.post(world.runner.run(task))
    world.step()
    return task


def until(world: World, kind: type, tier: str = "nvme") -> None:
    """Carry out a tier's tasks until one of this kind waits."""
    while not any(isinstance(t, kind) and t.tier == tier for t in world.tasks):
        carry_out(world, lambda task: task.tier == tier)


def rest(world: World, seconds: float = 1.0) -> World:
    """Let no lane begin a copy for a while, as after a failure: all that is saved meanwhile only waits."""
    for lane in world.coordinator.lanes.values():
        lane.not_before_s = world.now_s + seconds
    return world


def give_way(world: World, step: int) -> Any:
    """Ask for a region, and get it at once."""
    region, error = world.ask_for_region(step)
    assert error is None, error
    return region


def keeps_waiting(world: World, step: int) -> str:
    """Ask for a region, and get none until ``max_wait``; return what is said then."""
    answer = world.ask_for_region(step)
    assert answer == []
    world.now_s += 4.9
    world.step()
    assert answer == []
    world.now_s += 0.1
    world.step()
    region, error = answer
    assert region is None
    assert isinstance(error, CapacityError)
    return str(error)


# Several in flight -----------------------------------------------------------------------------------


def test_while_copies_only_go_on_no_plan_is_worked_out_again_for_a_save_that_waits() -> None:
    world = superseding()
    for step in (1, 2):
        world.save(step)
    answer = world.ask_for_region(3)
    until(world, CopyRun)
    ledger = world.coordinator.ledger
    with mock.patch.object(ledger, "view", wraps=ledger.view) as view:
        for _ in range(3):
            carry_out(world, lambda task: isinstance(task, CopyRun))
        assert view.call_count == 0
        assert answer == []
        until(world, CommitCopy)
        carry_out(world, lambda task: isinstance(task, CommitCopy))
        assert view.call_count > 0
    assert answer[1] is None, "a copy that has come is no mere progress"


def test_memory_for_four_has_four_on_their_way_and_each_tier_takes_them_in_order() -> None:
    world = World([file_rules("nvme"), file_rules("store")], memory_images=4)
    for step in (1, 2, 3, 4):
        world.save(step)
    assert len(world.memory.regions) == 4
    until(world, FinishCopy, "store")
    for step in (1, 2, 3):
        while step not in world.steps_on("nvme"):
            carry_out(world, lambda task: task.tier == "nvme")
    active = {tier: lane.active for tier, lane in world.coordinator.lanes.items()}
    assert active["nvme"] is not None
    assert active["store"] is not None
    assert (active["nvme"].entry.id.step, active["store"].entry.id.step) == (4, 1)
    answer = world.ask_for_region(5)
    assert answer[1] is None, "what a stored tier has makes room, though another is still owed it"
    assert {e.id.step for e in world.coordinator.ledger.entries.values() if e.region} == {2, 3, 4}
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [1, 2, 3, 4]
    world.check("store")


# Superseding -----------------------------------------------------------------------------------------


def test_the_oldest_that_waits_is_given_up_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    world = superseding(file_rules("nvme"), file_rules("store"), images=3)
    first, second, third = (world.save(step) for step in (1, 2, 3))
    with caplog.at_level(logging.WARNING):
        region = give_way(world, 4)
    assert second.outcome is SaveOutcome.SUPERSEDED
    error = second.exception()
    assert isinstance(error, CapacityError)
    for part in ("step 2 is superseded by step 4", "oldest unflushed one", "owed to nvme, store"):
        assert part in str(error)
    for wait in (
        second.captured,
        second.wait,
        lambda: second.wait("nvme"),
        lambda: second.wait("host"),
    ):
        with pytest.raises(CapacityError, match="superseded by step 4"):
            wait()
    assert not second.done("host")
    assert [r.getMessage() for r in caplog.records] == [str(error)]
    assert world.coordinator.counters.superseded_saves == 1
    assert world.coordinator.errors == [], "nothing failed: it was asked for"
    fourth = world.begin(4, region)
    world.seal(fourth)
    world.settle()
    assert [h.outcome for h in (first, third, fourth.handle)] == [SaveOutcome.SAVED] * 3
    assert world.steps_on("nvme") == world.steps_on("store") == [1, 3, 4]
    assert SECOND not in world.coordinator.ledger.entries


@pytest.mark.parametrize("images", [2, 3, 4])
def test_a_tier_that_is_slower_than_the_saves_gets_one_copy_after_the_other(images: int) -> None:
    """A copy takes seven tasks, and a save comes after every five."""
    world = superseding(images=images)
    for step in range(1, 101):
        answer = world.ask_for_region(step)
        while not answer:
            assert world.run_one()
        world.seal(world.begin(step, answer[0]))
        world.step()
        for _ in range(5):
            world.run_one()
    brought = world.steps_on("nvme")
    assert len(brought) > 60
    assert brought[-1] > 100 - 2 * images
    given_up = world.coordinator.counters.superseded_saves
    assert (given_up > 20) == (images > 2), "two images are one that is copied, and the newest"


@pytest.mark.parametrize("codec", Codec)
def test_one_whose_copy_failed_in_its_middle_is_given_up_and_the_tier_stays_in_trouble(
    codec: Codec,
) -> None:
    world = superseding(codecs={"nvme": codec})
    first = world.save(1)
    until(world, CopyRun)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferedWriter, "write", refuse)
        world.run_all()
    lane = world.coordinator.lanes["nvme"]
    tries, not_before_s = lane.tries, lane.not_before_s
    assert tries == 1
    world.save(2)
    give_way(world, 3)
    assert first.outcome is SaveOutcome.SUPERSEDED
    assert (lane.tries, lane.not_before_s, lane.failing_since_s) == (1, not_before_s, 0.0)
    world.settle(limit_s=2.0)
    assert world.stores["nvme"].files(FIRST) == ()
    assert world.disks["nvme"].discard_unfinished("") == 0
    assert world.steps_on("nvme") == [2]
    world.check("nvme")


def test_a_tier_that_refuses_writes_is_reported_however_fast_the_saves_are() -> None:
    world = superseding(images=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferedWriter, "write", silent)
        for step in range(1, 13):
            region, _ = world.ask_for_region(step)
            world.seal(world.begin(step, region))
            world.settle(limit_s=1.0)
            world.now_s += 1.0
    assert "nvme" in world.coordinator.ledger.failing
    assert "flush of 1@1 to nvme failed" in str(world.coordinator.errors[0])


def test_one_whose_end_failed_is_not_given_up_for_its_commit_may_be_there() -> None:
    world = superseding()
    first = world.save(1)
    until(world, FinishCopy)
    store = world.stores["nvme"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "commit", refuse)
        patch.setattr(type(store), "discard", refuse)
        carry_out(world, lambda task: isinstance(task, FinishCopy))
        world.run_all()
    assert store.files(FIRST) != ()
    assert world.coordinator.lanes["nvme"].active is None
    world.save(2)
    answer = world.ask_for_region(3)
    assert answer == []
    world.settle(limit_s=4.0)
    assert answer[1] is None
    assert first.outcome is SaveOutcome.SAVED
    assert world.steps_on("nvme") == [1, 2]


def test_what_lies_below_of_an_earlier_starts_try_is_collected_with_it() -> None:
    world = superseding()
    world.save(1)
    until(world, FinishCopy)
    store = world.stores["nvme"]
    finish = next(task for task in world.tasks if isinstance(task, FinishCopy))
    finish.writer.finish(finish.manifest)
    store.write_manifest(FIRST, finish.shard, finish.manifest.encode())
    world.save(2)
    world.crash()
    world.start()
    rest(world)
    assert store.files(FIRST) != ()
    give_way(world, 3)
    world.settle()
    assert store.files(FIRST) == ()
    assert world.steps_on("nvme") == [2]


def test_what_a_worker_reads_stays_and_the_next_oldest_goes() -> None:
    world = superseding(images=3)
    first = world.save(1)
    until(world, CopyRun)
    region = world.coordinator.ledger.entries[FIRST].region
    assert region is not None
    second = world.save(2)
    world.save(3)
    give_way(world, 4)
    assert (first.outcome, second.outcome) == (SaveOutcome.PENDING, SaveOutcome.SUPERSEDED)
    assert region.sealed
    assert bytes(region.image) == world.image(FIRST)
    assert len(world.memory.regions) == 3
    assert world.coordinator.counters.superseded_saves == 1, "one was enough"


def test_a_crash_after_the_seal_is_gone_leaves_nothing_of_it() -> None:
    world = superseding(images=3)
    for step in (1, 2, 3):
        world.save(step)
    give_way(world, 4)
    world.crash()
    world.start()
    assert [e.id.step for e in world.coordinator.ledger.ordered()] == [1, 3]
    world.settle()
    assert world.steps_on("nvme") == [1, 3]
    assert world.stores["nvme"].files(SECOND) == ()


def test_what_an_earlier_start_left_on_its_way_may_be_superseded_too() -> None:
    world = superseding(images=3)
    for step in (1, 2, 3):
        world.save(step)
    world.crash()
    world.start()
    give_way(world, 4)
    assert world.coordinator.counters.superseded_saves == 1
    world.settle()
    assert world.steps_on("nvme") == [1, 3]


def store_alone(world: World, until: Callable[[], bool]) -> None:
    """Carry out the tasks of tier store, and no others, until that holds."""
    while not until():
        carry_out(world, lambda task: task.tier == "store")


def test_what_is_saved_stays_saved_and_who_waits_for_another_tier_is_notified() -> None:
    """The last tier had it, and dropped it; it was still owed to another."""
    world = superseding(file_rules("nvme"), file_rules("store", retain_last=1), images=3)
    first, second = world.save(1), world.save(2)
    store_alone(world, lambda: world.steps_on("store") == [2] and second.done("store"))
    store_alone(world, lambda: not any(task.tier == "store" for task in world.tasks))
    assert first.outcome is SaveOutcome.SAVED
    for task in [task for task in world.tasks if task.tier == "nvme"]:
        world.tasks.remove(
            task
        )  # the copy to nvme fails before it is opened, and is tried again later
        world.coordinator.post(Outcome(task=task, error=AccessDeniedError("on purpose")))
    world.step()
    world.save(3)
    world.save(4)
    give_way(world, 5)
    assert FIRST not in world.coordinator.ledger.entries
    assert first.outcome is SaveOutcome.SAVED
    first.wait(timeout=0)
    first.captured(timeout=0)
    with pytest.raises(CapacityError, match="step 1 is superseded by step 5"):
        first.wait("nvme", timeout=0)


def test_what_a_tier_is_about_to_drop_is_not_reported_to_be_superseded() -> None:
    """A pin that another process sets meanwhile keeps it there."""
    world = superseding(file_rules("nvme"), file_rules("store", retain_last=1), images=3)
    world.coordinator.lanes["nvme"].not_before_s = 10.0
    first, _ = world.save(1), world.save(2)
    store_alone(world, lambda: any(isinstance(t, DeleteCopy) for t in world.tasks))
    mark = Mark(name=keys.PIN_MARK, checkpoint=FIRST, wall_time_s=0.0)
    world.stores["store"].add_mark(mark)
    world.save(3)
    world.save(4)
    world.ask_for_region(5)
    world.settle(limit_s=0)
    assert FIRST in world.coordinator.ledger.entries
    assert 1 in world.steps_on("store")
    assert first.outcome is SaveOutcome.SAVED
    assert FIRST.step not in [h.step for h in world.handles.values() if h.exception()]


def test_what_a_stored_tier_has_only_leaves_memory() -> None:
    world = superseding(file_rules("nvme"), file_rules("store"))
    first = world.save(1)
    until(world, CopyRun, "store")
    while world.steps_on("nvme") != [1]:
        carry_out(world, lambda task: task.tier == "nvme")
    world.save(2)
    answer = world.ask_for_region(3)
    assert answer == [], "a worker reads it still"
    carry_out(world, lambda task: isinstance(task, CopyRun) and task.tier == "store")
    while not answer:
        carry_out(world, lambda task: task.tier == "store")
    assert answer[1] is None
    assert world.coordinator.counters.superseded_saves == 0
    world.settle()
    assert first.outcome is SaveOutcome.SAVED
    assert 1 in world.steps_on("store")


# What is never superseded ----------------------------------------------------------------------------


def test_the_newest_in_memory_stays_and_the_save_waits_as_wait_does() -> None:
    world = rest(superseding(images=1), 6.0)
    world.save(1)
    output = keeps_waiting(world, 2)
    assert "max_wait (5 s)" in output
    assert "nothing was given up for it: 1@1: the newest in memory" in output
    answer = world.ask_for_region(2)
    world.settle(limit_s=2.0)
    assert answer[1] is None
    assert world.steps_on("nvme") == [1]


def test_a_pinned_one_stays_and_the_next_oldest_goes() -> None:
    world = rest(superseding(images=3))
    handles = [world.save(step) for step in (1, 2, 3)]
    pin = Command(kind=CommandKind.PIN, id=FIRST, wall_time_s=0.0, on_answer=lambda failed: None)
    world.coordinator.post(pin)
    give_way(world, 4)
    outcomes = [handle.outcome for handle in handles]
    assert outcomes == [SaveOutcome.PENDING, SaveOutcome.SUPERSEDED, SaveOutcome.PENDING]


def test_nothing_goes_while_a_restore_reads() -> None:
    world = rest(superseding())
    first, _ = world.save(1), world.save(2)
    world.coordinator.deleter.set_paused(True)
    assert "1@1: a restore is reading" in keeps_waiting(world, 3)
    rest(world)
    world.coordinator.deleter.set_paused(False)
    give_way(world, 3)
    assert first.outcome is SaveOutcome.SUPERSEDED


def test_what_is_just_being_committed_stays() -> None:
    world = superseding()
    first = world.save(1)
    until(world, CommitCopy)
    world.save(2)
    answer = world.ask_for_region(3)
    assert answer == []
    carry_out(world, lambda task: isinstance(task, CommitCopy))
    assert answer[1] is None
    assert first.outcome is SaveOutcome.SAVED
    assert world.steps_on("nvme") == [1]


def test_the_newest_on_its_way_to_a_sparing_tier_stays_until_there_is_a_newer_one() -> None:
    world = rest(
        superseding(file_rules("nvme"), file_rules("pfs", shared=True, flush_every=3), images=3)
    )
    handles: dict[int, SaveHandle] = {}

    def given_up_for(step: int) -> set[int]:
        before = {s for s, h in handles.items() if h.outcome is SaveOutcome.SUPERSEDED}
        handles[step] = world.save(step)
        return {s for s, h in handles.items() if h.outcome is SaveOutcome.SUPERSEDED} - before

    assert [given_up_for(step) for step in (1, 2, 3, 4, 5)] == [set(), set(), set(), {1}, {2}]
    assert given_up_for(6) == {4}, "3 is the newest that is owed to pfs"
    assert given_up_for(7) == {3}, "6 is owed to it too"


def test_with_a_tier_that_saves_outrun_the_one_it_waits_for_arrives() -> None:
    """Each save finds memory full, and yet what a sparing tier takes comes to it."""
    world = superseding(file_rules("nvme"), file_rules("pfs", shared=True, flush_every=4), images=3)
    for step in range(1, 21):
        answer = world.ask_for_region(step)
        while not answer:
            assert world.run_one()
        snapshot = world.begin(step, answer[0])
        world.seal(snapshot)
        for _ in range(2):  # a copy takes seven tasks
            world.run_one()
    assert world.coordinator.counters.superseded_saves > 5
    assert world.steps_on("pfs"), "nothing would survive the loss of the node"


# The end ---------------------------------------------------------------------------------------------


def test_whoever_is_superseded_is_not_reported_another_reason_when_the_run_ends() -> None:
    world = superseding(images=3)
    _, second, _ = (world.save(step) for step in (1, 2, 3))
    give_way(world, 4)
    world.coordinator.stop(TierfallError("stopped on purpose"))
    assert second.outcome is SaveOutcome.SUPERSEDED
    with pytest.raises(CapacityError, match="superseded"):
        second.wait()


def test_a_superseded_one_is_neither_pinned_nor_dropped_a_second_time() -> None:
    world = superseding(images=3)
    for step in (1, 2, 3):
        world.save(step)
    give_way(world, 4)
    failed = world.order(CommandKind.PIN, SECOND)
    assert "2@1" in str(failed["tierfall"])
    assert not [t for t in world.tasks if isinstance(t, DeleteCopy)]
