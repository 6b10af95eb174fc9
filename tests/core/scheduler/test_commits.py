"""Commits of several ranks: failures of one rank, and messages at the wrong moment."""

from __future__ import annotations

import random

import pytest

from tests.faults import Fault, FaultKind, Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.rank import CUT, Rank
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.format.records import Mark
from tierfall.core.scheduler.group.commands import RETRY_S
from tierfall.core.scheduler.ledger.tasks import CommitCopy, CopyRun, DeleteCopy, FinishCopy, Task
from tierfall.core.types import keys as names
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    FlushError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome
from tierfall.tiers.stored import StoredTier

DRAW = random.Random(1)
COMMITS = "run/step-*/commit.json"


def world(node_of: tuple[int, ...] = (0, 1), tiers: str = "both", **members: object) -> Many:
    """Ranks on nodes, with both tiers or with one of them."""
    chosen = [file_rules(NODE_TIER), file_rules(SHARED_TIER, shared=True)]
    if tiers != "both":
        chosen = [rules for rules in chosen if rules.name == tiers]
    return Many(node_of, chosen, max_wait_s=10.0, **members)  # type: ignore[arg-type]


def failing(
    operation: Operation, error: type[BackendError], keys: str = "run/step-*"
) -> list[Fault]:
    kind = FaultKind.FAIL_BEFORE
    return [Fault(kind=kind, operation=operation, keys=keys, times=None, error=error)]


def talk(run: Many) -> None:
    """Deliver all messages, and what they cause."""
    while run.network.waiting or any(rank.is_told for rank in run.ranks):
        run.deliver()
        run.hear()


def work(run: Many, rank: Rank, until: type[Task]) -> None:  # type: ignore[valid-type]
    """Carry out a rank's tasks until one of that kind waits."""
    while not any(isinstance(task, until) for task in rank.tasks):
        assert rank.run_one(DRAW), f"{until} never comes"
        talk(run)


def folder_is_empty(run: Many, tier: str) -> bool:
    keys = [key for disk in run.disks(tier).values() for key in disk._objects]
    return not any(key.startswith("run/step-") for key in keys)


def pass_time(run: Many, seconds: float) -> None:
    run.now_s += seconds
    run.step()
    talk(run)


def test_a_tier_that_was_given_up_before_a_rank_came_to_save_is_given_up_there_too() -> None:
    run = world(tiers=SHARED_TIER)
    fast, slow = run.ranks
    fast.troubles[SHARED_TIER].strike(failing(Operation.WRITE, StorageFullError))
    fast.save(1)
    run.settle(limit_s=1.0)
    assert isinstance(fast.handles[CheckpointId(1, 1)].exception(), FlushError)
    handle = slow.save(1)
    run.settle()
    with pytest.raises(FlushError, match=r"rank 0: .* the disk is full"):
        handle.wait(SHARED_TIER, timeout=0)
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert folder_is_empty(run, SHARED_TIER)


def test_a_drop_whose_marks_a_rank_cannot_read_is_asked_for_again_after_a_while() -> None:
    rules = file_rules(NODE_TIER, capacity_bytes=int(2.5 * IMAGE))
    run = Many((0, 1), [rules], max_wait_s=10.0)
    for step in (1, 2):
        for rank in run.ranks:
            rank.save(step)
        run.settle(limit_s=1.0)
    trouble = run.ranks[1].troubles[NODE_TIER]
    trouble.strike(failing(Operation.SCAN, UnreachableError, keys="*/marks/*"))
    for rank in run.ranks:
        rank.save(3)
    run.settle(limit_s=100.0)
    asked = [line for line in run.trace if line.startswith("rank 1: ReadMarks") and "scan" in line]
    assert 1 < len(asked) < 10
    trouble.strike([])
    run.settle(limit_s=100.0)
    assert all(rank.handles[CheckpointId(3, 1)].done(NODE_TIER) for rank in run.ranks)


def test_what_lands_while_it_is_given_up_is_taken_back() -> None:
    run = world(tiers=SHARED_TIER)
    lands, fails = run.ranks
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    work(run, lands, FinishCopy)
    fails.troubles[SHARED_TIER].strike(failing(Operation.WRITE, StorageFullError))
    while fails.run_one(DRAW):
        talk(run)
    assert any(isinstance(task, FinishCopy) for task in lands.tasks), "it is too late to land"
    run.settle()
    assert folder_is_empty(run, SHARED_TIER)
    assert not any(rank.coordinator.ledger.entries[CheckpointId(1, 1)].owed for rank in run.ranks)


def test_a_copy_under_way_that_a_rule_of_rank_0_gives_up_is_stopped_and_is_no_failure() -> None:
    run = world(tiers=SHARED_TIER)
    decides, follows = run.ranks
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    work(run, follows, CopyRun)
    assert decides.coordinator.commits is not None
    decides.coordinator.commits.give_up_by_rule(
        SHARED_TIER, CheckpointId(1, 1), "newer ones came first"
    )
    talk(run)
    while follows.run_one(DRAW):
        assert not any(isinstance(task, FinishCopy) for task in follows.tasks), "it was brought"
        talk(run)
    run.settle()
    assert folder_is_empty(run, SHARED_TIER)
    for rank in run.ranks:
        with pytest.raises(FlushError, match="newer ones came first"):
            rank.handles[CheckpointId(1, 1)].wait(SHARED_TIER, timeout=0)
        assert rank.coordinator.counters.flush_failures == 0
        assert not rank.coordinator.errors


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tier", [NODE_TIER, SHARED_TIER])
def test_a_commit_that_fails_for_good_leaves_no_record_anywhere(tier: str, seed: int) -> None:
    """On the shared tier the record is there though its writer was told otherwise; else one node has its own."""
    run = world((0, 0, 1, 1), tiers=tier, seed=seed)
    kind = FaultKind.FAIL_AFTER if tier == SHARED_TIER else FaultKind.FAIL_BEFORE
    writer = run.ranks[0 if tier == SHARED_TIER else 2]
    writer.troubles[tier].strike(
        [Fault(kind=kind, operation=Operation.PUBLISH, keys=COMMITS, error=BackendError)]
    )
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    assert folder_is_empty(run, tier)
    assert not any(rank.committed(tier) for rank in run.ranks)
    for rank in run.ranks:
        with pytest.raises(FlushError, match="failed"):
            rank.handles[CheckpointId(1, 1)].wait(tier, timeout=0)


def test_a_rank_that_loses_patience_as_the_last_image_is_sealed_takes_nothing_away() -> None:
    run = world()
    early, last = run.ranks[1], run.ranks[0]
    early.save(1)
    talk(run)
    last.save(1)  # rank 0 has not said yet that it is whole
    run.now_s += 10.0
    early.step()
    talk(run)
    run.settle()
    for rank in run.ranks:
        assert rank.sealed() == {CheckpointId(1, 1)}
        assert rank.handles[CheckpointId(1, 1)].outcome is SaveOutcome.SAVED


def test_others_are_notified_of_a_tier_that_does_not_answer_one_rank_and_train_on() -> None:
    """Later saves too; a drop that makes room here does not help there; and memory is given for the next saves."""
    run = world(tiers=SHARED_TIER, memory_images=2)
    bad = run.ranks[1]
    bad.troubles[SHARED_TIER].strike(failing(Operation.WRITE, UnreachableError))
    for step in range(1, 6):
        for rank in run.ranks:
            region, error = rank.ask(step)
            assert error is None, error
            rank.advance(rank.begin(step, region), CUT.chunk_count)
        run.settle(limit_s=100.0)
        for rank in run.ranks:
            assert rank.handles[CheckpointId(step, 1)].outcome is SaveOutcome.FAILED
            assert not rank.coordinator.busy()
    bad.troubles[SHARED_TIER].stop()
    run.settle()
    assert run.committed(SHARED_TIER) == {CheckpointId(4, 1), CheckpointId(5, 1)}
    for rank in run.ranks:
        assert rank.committed(SHARED_TIER) == run.committed(SHARED_TIER)
        assert not rank.coordinator.ledger.failing
    assert run.ranks[0].handles[CheckpointId(5, 1)].outcome is SaveOutcome.SAVED


@pytest.mark.parametrize("uploaded", [False, True])
def test_what_one_rank_lets_go_of_no_rank_goes_on_to_bring_unless_it_is_uploaded(
    uploaded: bool,
) -> None:
    run = world(tiers=SHARED_TIER, memory_images=2)
    ahead, bad = run.ranks
    full = ahead if uploaded else bad
    bad.troubles[SHARED_TIER].strike(failing(Operation.WRITE, UnreachableError))
    for step in (1, 2):
        for rank in run.ranks:
            rank.save(step)
    run.settle(limit_s=100.0)
    region, error = full.ask(3)
    assert error is None, error
    assert CheckpointId(1, 1) not in full.sealed()
    region.release()
    bad.troubles[SHARED_TIER].stop()
    run.settle()
    first, second = CheckpointId(1, 1), CheckpointId(2, 1)
    assert run.committed(SHARED_TIER) == ({first, second} if uploaded else {second})
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    if not uploaded:
        with pytest.raises(FlushError, match=r"rank 1: .*memory is full"):
            ahead.handles[first].wait(SHARED_TIER, timeout=0)


def test_room_made_on_one_rank_does_not_help_another_that_is_stuck() -> None:
    run = world(tiers=NODE_TIER)
    run.ranks[1].troubles[NODE_TIER].strike(failing(Operation.WRITE, UnreachableError))
    for rank in run.ranks:
        rank.save(1)
    run.settle(limit_s=100.0)
    deleter = run.ranks[0].coordinator.deleter
    deleter.delete(DeleteCopy(tier=NODE_TIER, id=CheckpointId(9, 1), reason="x", unfinished=True))
    run.settle(limit_s=10.0)
    assert not run.ranks[0].coordinator.busy()


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_recovers_before_another_does_not_wait_for_that_one(early: int) -> None:
    run = world(tiers=NODE_TIER)
    for rank in run.ranks:
        rank.troubles[NODE_TIER].strike(failing(Operation.WRITE, UnreachableError))
        rank.save(1)
    run.settle(limit_s=60.0)
    first, second = run.ranks[early], run.ranks[1 - early]
    assert all(NODE_TIER in rank.coordinator.ledger.failing for rank in run.ranks)
    first.troubles[NODE_TIER].stop()
    run.settle(limit_s=60.0)
    assert not first.coordinator.busy(), "the other is still stuck"
    second.troubles[NODE_TIER].stop()
    run.settle()
    assert all(rank.committed(NODE_TIER) == {CheckpointId(1, 1)} for rank in run.ranks)
    assert not any(rank.coordinator.ledger.failing for rank in run.ranks)


def test_a_commit_that_does_not_get_through_is_reported() -> None:
    run = world(tiers=SHARED_TIER)
    trouble = run.ranks[0].troubles[SHARED_TIER]
    trouble.strike(failing(Operation.PUBLISH, UnreachableError, COMMITS))
    for rank in run.ranks:
        rank.save(1)
    run.settle(limit_s=100.0)
    for rank in run.ranks:
        who = "" if rank.number == 0 else "rank 0: "
        with pytest.raises(FlushError, match=rf"{who}.*still being tried.*failed before"):
            rank.handles[CheckpointId(1, 1)].wait(SHARED_TIER, timeout=0)
        assert not rank.coordinator.busy()
    trouble.stop()
    run.settle(limit_s=100.0)
    assert all(r.handles[CheckpointId(1, 1)].outcome is SaveOutcome.SAVED for r in run.ranks)


def test_leaders_are_hurried_once() -> None:
    run = world((0, 1, 2))
    run.ranks[0].save(1)
    talk(run)
    run.network.forget_counts()
    pass_time(run, 0.0)
    for _ in range(20):
        pass_time(run, 5.0 / 20 + 0.01)
    before = run.network.counts().messages
    assert before == 2
    for _ in range(5):
        run.step()
    assert run.network.counts().messages == before


def test_a_rank_that_counts_otherwise_makes_no_checkpoint_that_cannot_be_restored() -> None:
    run = world()
    run.ranks[0].save(1)  # and rank 1 never does
    for rank in run.ranks:
        rank.save(2)
    run.settle()
    for rank in run.ranks:
        with pytest.raises(
            CaptureError, match="rank 1 saved it as checkpoint 1 of the lineage, and rank 0 as"
        ):
            rank.handles[CheckpointId(2, 1)].wait(timeout=0)
    assert folder_is_empty(run, NODE_TIER)
    assert folder_is_empty(run, SHARED_TIER)
    for rank in run.ranks:
        rank.save(3)
    run.settle()
    for rank in run.ranks:
        rank.handles[CheckpointId(3, 1)].wait(timeout=0)  # all count alike again


def test_the_newest_whole_image_stays_while_a_newer_one_waits_for_the_others() -> None:
    run = world(memory_images=2)
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    early = run.ranks[1]
    early.save(2)
    answer = early.ask(3)
    assert not answer, "room was made at the cost of the newest that is whole"
    assert early.sealed() == {CheckpointId(1, 1), CheckpointId(2, 1)}
    run.ranks[0].save(2)
    run.settle(limit_s=5.0)
    assert answer[1] is None


def test_a_part_of_a_committed_checkpoint_goes_once_a_newer_one_is_whole() -> None:
    """All are killed between the commits of two nodes, and one machine loses its memory."""
    run = world(tiers=NODE_TIER)
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    for rank in run.ranks:
        work(run, rank, CommitCopy) if rank.number else [rank.run_one(DRAW) for _ in range(9)]
        talk(run)
    while not run.records(NODE_TIER, 0):
        assert run.ranks[0].run_one(DRAW)
    assert not run.records(NODE_TIER, 1)
    run.crash(nodes_lost=[1])
    run.start()
    run.settle()
    assert set(run.records(NODE_TIER, 0)) == {CheckpointId(1, 1)}, "its rest may come back"
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    assert set(run.records(NODE_TIER, 0)) == {CheckpointId(1, 2)} == run.committed(NODE_TIER)


def test_what_has_its_parts_in_different_places_is_not_flushed_for_ever() -> None:
    """Of one node the record is there and the memory lost, of the other the image is only in memory."""
    run = world(tiers=NODE_TIER)
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    while not run.records(NODE_TIER, 1):
        for rank in run.ranks:
            if rank.number or not any(isinstance(task, CommitCopy) for task in rank.tasks):
                rank.run_one(DRAW)
            talk(run)
    assert not run.records(NODE_TIER, 0)
    run.crash(nodes_lost=[1])
    run.start()
    assert run.started_from == CheckpointId(1, 1)
    run.settle()
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert run.ranks[0].sealed() == {CheckpointId(1, 1)}, "it is what a restore would take"


def test_nothing_is_known_of_a_checkpoint_whose_last_copy_was_given_up() -> None:
    """A rank had it on one tier alone, and that dropped it before the other was begun."""
    run = world()
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    for rank in run.ranks:
        entry = rank.coordinator.ledger.entries[CheckpointId(1, 1)]
        entry.states.clear()
        entry.owed.add(NODE_TIER)
    run.settle()
    assert not any(rank.coordinator.ledger.entries for rank in run.ranks)


def test_a_skip_of_one_rank_ends_the_save_of_all() -> None:
    run = world((0, 0, 1))
    for rank in run.ranks[:2]:
        rank.save(1)
    run.ranks[2].skip(1, CapacityError("full"))
    run.settle()
    for rank in run.ranks:
        assert rank.handles[CheckpointId(1, 1)].outcome is SaveOutcome.SKIPPED
        assert not rank.memory.regions


def test_a_tombstone_that_a_pin_contradicts_ends_the_flush_of_no_rank_alone() -> None:
    """The deletion waits for an end that was not answered, and is refused then: all must still bring their parts."""
    run = world()
    first, one = run.ranks[0], CheckpointId(1, 1)
    manifests = "run/step-*/rank-*.json"
    first.troubles[NODE_TIER].strike(failing(Operation.PUBLISH, UnreachableError, manifests))
    for rank in run.ranks:
        rank.save(1)
    run.settle(limit_s=5.0)
    assert first.committed(SHARED_TIER) == {one}
    store = StoredTier(name=SHARED_TIER, run="run", backend=run.disk(SHARED_TIER, 0))
    for name in (names.TOMBSTONE_MARK, names.PIN_MARK):
        store.add_mark(Mark(name=name, checkpoint=one, wall_time_s=0.0))
        first.coordinator.deleter.plan_all_tiers()
        run.settle(limit_s=5.0)
    first.troubles[NODE_TIER].stop()
    run.settle()
    assert all(rank.committed(NODE_TIER) == {one} for rank in run.ranks)
    assert not any(rank.coordinator.busy() for rank in run.ranks)


@pytest.mark.parametrize("under_way", [False, True])
def test_a_part_whose_deletion_is_tried_again_is_not_forgotten_meanwhile(under_way: bool) -> None:
    """Its tombstone keeps it from going as a mere part, once a newer one is whole."""
    run = world(tiers=NODE_TIER)
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    one = CheckpointId(1, 1)
    store = StoredTier(name=NODE_TIER, run="run", backend=run.disk(NODE_TIER, 0))
    store.add_mark(Mark(name=names.TOMBSTONE_MARK, checkpoint=one, wall_time_s=0.0))
    other = StoredTier(name=NODE_TIER, run="run", backend=run.disk(NODE_TIER, 1))
    other.delete(one, attempt=None)
    run.crash(nodes_lost=[0, 1])
    run.start()
    trouble = run.ranks[0].troubles[NODE_TIER]
    trouble.strike(failing(Operation.CREATE, UnreachableError, "run/step-*/marks/*"))
    for rank in run.ranks:
        rank.save(2)
    run.settle(limit_s=5.0)
    assert set(run.records(NODE_TIER, 0)) == {one, CheckpointId(2, 2)}
    trouble.stop()
    held: list[Task] = []
    if under_way:
        rank = run.ranks[0]
        rank.coordinator.deleter.delete(DeleteCopy(tier=NODE_TIER, id=one, reason="a part of it"))
        held, rank.tasks[:] = rank.tasks[:], []
    pass_time(run, RETRY_S)
    while any(rank.run_one(DRAW) for rank in run.ranks):
        talk(run)
    run.ranks[0].tasks.extend(held)
    run.settle()
    assert set(run.records(NODE_TIER, 0)) == {CheckpointId(2, 2)}
