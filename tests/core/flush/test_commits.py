"""Commits of several ranks: failures of one rank, and messages at the wrong moment."""

from __future__ import annotations

import random

import pytest

from tests.faults import Fault, FaultKind, Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.rank import Rank
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.flush.messages import SaveFailure
from tierfall.core.flush.tasks import CommitCopy, FinishCopy, Task
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    FlushError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome

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


def test_a_tier_that_was_given_up_before_a_rank_came_to_save_is_given_up_there_too() -> None:
    run = Many((0, 1), [file_rules(SHARED_TIER, shared=True, capacity_bytes=IMAGE)])
    fast, slow = run.ranks
    fast.save(1)
    run.settle(limit_s=1.0)
    assert isinstance(fast.handles[CheckpointId(1, 1)].exception(), CapacityError)
    handle = slow.save(1)
    run.settle()
    with pytest.raises(FlushError, match=r"rank 0: .* it is left out"):
        handle.wait(SHARED_TIER, timeout=0)
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert folder_is_empty(run, SHARED_TIER)


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


@pytest.mark.parametrize("seed", range(3))
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


def test_a_commit_that_fails_takes_back_nothing_that_an_earlier_start_committed() -> None:
    """One node has lost its part. That of the other one may be pinned, or be the last that there is."""
    run = world(tiers=NODE_TIER)
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    run.crash()
    lost = run.disk(NODE_TIER, 1)._objects
    for key in [key for key in lost if key.startswith("run/step-")]:
        del lost[key]
    run.start()
    run.ranks[1].troubles[NODE_TIER].strike(failing(Operation.PUBLISH, BackendError, COMMITS))
    run.settle()
    assert list(run.records(NODE_TIER, 0)) == [CheckpointId(1, 1)]
    assert not run.records(NODE_TIER, 1)
    run.ranks[1].troubles[NODE_TIER].strike([])
    run.crash()
    run.start()
    run.settle()
    assert run.committed(NODE_TIER) == {CheckpointId(1, 1)}


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


def test_a_save_that_is_given_up_after_its_image_has_left_memory_is_owed_to_no_tier() -> None:
    """One rank has uploaded its image, and has freed it for a newer one."""
    run = world(tiers=SHARED_TIER)
    first, late = run.ranks
    late.troubles[SHARED_TIER].strike(failing(Operation.WRITE, UnreachableError))
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    while first.run_one(DRAW):
        talk(run)
    entry = first.coordinator.ledger.entries[CheckpointId(1, 1)]
    assert entry.uploaded_to == {SHARED_TIER}
    entry.free()
    entry.set_state("host", CopyState.ABSENT)
    failure = SaveFailure(text="a newer one takes its place", outcome=SaveOutcome.SUPERSEDED)
    first.coordinator.seals.give_up(entry.id, failure)
    run.settle()
    assert [rank.handles[entry.id].outcome for rank in run.ranks] == [SaveOutcome.SUPERSEDED] * 2
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert folder_is_empty(run, SHARED_TIER)


def test_copies_that_were_given_up_are_no_work_any_more() -> None:
    """What the planner looks at in each step does not grow with them, nor do they count as failures of the tier."""
    run = world()
    node = run.ranks[1].troubles[NODE_TIER]
    node.strike(failing(Operation.PUBLISH, BackendError, COMMITS))
    for step in range(1, 9):
        for rank in run.ranks:
            rank.save(step)
        run.settle()
    ledger = run.ranks[0].coordinator.ledger
    assert len(run.committed(SHARED_TIER)) == 8
    assert not run.committed(NODE_TIER)
    assert len(ledger.open()) <= 3, "those in memory"
