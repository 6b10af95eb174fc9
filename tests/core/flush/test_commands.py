"""A person's commands and concurrent events: no promise to the person is undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.world import IMAGE, World, decided_on, file_rules
from tierfall.core.flush.tasks import (
    AddDecided,
    Command,
    CommandKind,
    DeleteCopy,
    ReadDecided,
    Task,
)
from tierfall.core.format.decided import Word
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import FlushError, StepError
from tierfall.core.types.values import CheckpointId, SaveOutcome
from tierfall.tiers.stored import StoredTier

FIRST = CheckpointId(1, 1)
Answer = list[dict[str, BaseException]]


def give(world: World, kind: CommandKind, id: CheckpointId, tag: str = "") -> Answer:
    """Give an order, and carry out no task yet."""
    answer: Answer = []
    world.coordinator.post(Command(kind=kind, id=id, tag=tag, on_answer=answer.append))
    world.step()
    return answer


def carry_out(world: World, kind: type[Task], **members: object) -> None:
    """Carry out the first waiting task of that kind, before all others."""
    task = next(
        t
        for t in world.tasks
        if isinstance(t, kind) and all(getattr(t, k) == v for k, v in members.items())
    )
    world.run(task)


def until(world: World, condition: Callable[[], bool]) -> None:
    while not condition():
        assert world.run_one()


def waiting(world: World, kind: type[Task]) -> bool:
    return any(isinstance(task, kind) for task in world.tasks)


def decide(disk: MemoryBackend, word: Word, attempt_id: str, id: CheckpointId = FIRST) -> None:
    """What a person's command does beside a living trainer."""
    tier = StoredTier(name="disk", run="run", backend=disk)
    tier.decided.add(tier.decided.read().next(word, id, attempt_id))


def leave(world: World, tier: str, word: Word) -> None:
    entry = world.coordinator.ledger.entries[FIRST]
    assert entry.attempt_id is not None
    decide(world.disks[tier], word, entry.attempt_id)


def saved(*tiers: str, steps: int = 2, **rules: object) -> World:
    world = World([file_rules(tier, **rules) for tier in tiers])  # type: ignore[arg-type]
    world.save_all(*range(1, steps + 1))
    return world


def test_a_pin_that_comes_too_late_is_refused() -> None:
    world = World([file_rules("nvme", retain_last=1)], memory_images=1)
    world.save_all(1)
    region, _ = world.ask_for_region(2)
    world.seal(world.begin(2, region))
    world.step()
    until(world, lambda: waiting(world, DeleteCopy))
    answer = give(world, CommandKind.PIN, FIRST)
    carry_out(world, DeleteCopy)
    world.settle()
    assert isinstance(answer[0]["tierfall"], StepError)
    assert "just being dropped" in str(answer[0]["tierfall"])
    assert world.steps_on("nvme") == [2]


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


# Deletions -------------------------------------------------------------------------------------------


def test_a_deletion_that_one_list_does_not_take_is_carried_out_there_too_and_noted_later() -> None:
    fault = Fault(
        kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, keys="*-deleted-*", times=2
    )

    def wrap(name: str, inner: Backend) -> Backend:
        return Faulty(inner, seed=0, plan=[fault]) if name == "store" else inner

    world = World([file_rules("nvme"), file_rules("store")], wrap=wrap)
    world.save_all(1, 2)
    leave(world, "nvme", Word.DELETED)
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [2]
    assert decided_on([world.disks["store"]]) == decided_on([world.disks["nvme"]])


def test_a_pin_that_comes_between_the_deletion_and_the_drop_keeps_the_copy_and_is_reported() -> (
    None
):
    world = saved("nvme")
    answer = give(world, CommandKind.DELETE, FIRST)
    until(world, lambda: waiting(world, DeleteCopy))
    leave(world, "nvme", Word.PIN)
    world.settle()
    assert "is pinned" in str(answer[0]["tierfall"])
    assert world.steps_on("nvme") == [1, 2]


def test_no_copy_is_deleted_before_the_deletion_is_noted() -> None:
    world = saved("nvme", "store")
    give(world, CommandKind.DELETE, FIRST)
    assert not waiting(world, DeleteCopy)
    assert len(world.memory.regions) == 2
    carry_out(world, AddDecided, tier="store")
    assert [t.tier for t in world.tasks if isinstance(t, DeleteCopy)] == ["store"]


def test_no_deletion_takes_anything_away_while_a_restore_reads() -> None:
    world = saved("nvme")
    world.coordinator.deleter.set_paused(True)
    answer = give(world, CommandKind.DELETE, FIRST)
    world.run_all()
    assert answer == []
    assert [entry.word for entry in decided_on([world.disks["nvme"]])] == [Word.DELETED]
    assert world.steps_on("nvme") == [1, 2]
    assert len(world.memory.regions) == 2
    world.coordinator.deleter.set_paused(False)
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [2]


def test_a_drop_for_room_is_planned_anew_if_a_person_deletes_another_meanwhile() -> None:
    """The older one goes because the newer one is there: not both at once. With that gone, there is room."""
    world = saved("nvme", capacity_bytes=int(2.5 * IMAGE))
    world.save(3)
    assert waiting(world, DeleteCopy)
    answer = give(world, CommandKind.DELETE, CheckpointId(2, 1))
    assert [t.id for t in world.tasks if isinstance(t, DeleteCopy)] == [FIRST]
    carry_out(world, AddDecided)
    assert [t.id for t in world.tasks if isinstance(t, DeleteCopy)] == [FIRST]
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [1, 3]


def test_a_deletion_is_completed_on_a_tier_that_could_not_be_read_by_the_start_that_reads_it() -> (
    None
):
    world = saved("nvme", "store")
    world.crash()
    world.start(unread=("store",))
    failed = world.order(CommandKind.DELETE, FIRST)
    assert "could not be read when the run was opened" in str(failed["store"])
    assert world.steps_on("nvme") == [2], "no tier waits for another"
    assert world.steps_on("store") == [1, 2]
    world.crash()
    world.start()
    world.settle()
    assert world.steps_on("nvme") == world.steps_on("store") == [2]


# Lists that others read and write --------------------------------------------------------------------


def test_what_a_person_decides_beside_the_trainer_is_read_within_a_minute() -> None:
    world = saved("nvme", "store")
    began_s = world.now_s
    leave(world, "store", Word.PIN)
    world.settle(limit_s=61.0)
    assert not waiting(world, ReadDecided)
    assert world.now_s <= began_s + 61.0
    assert world.coordinator.ledger.entries[FIRST].pinned
    assert decided_on([world.disks["nvme"]]).names == decided_on([world.disks["store"]]).names


def test_what_is_decided_on_the_disk_of_one_node_is_known_to_every_rank() -> None:
    run = Many((0, 1), [file_rules(NODE_TIER), file_rules(SHARED_TIER, shared=True)])
    for rank in run.ranks:
        rank.save(1)
    run.settle()
    attempt_id = run.ranks[1].coordinator.ledger.entries[FIRST].attempt_id
    assert attempt_id is not None
    last = run.ranks[1].stores[NODE_TIER].decided
    for word in (Word.PIN, Word.UNPIN):
        last.add(last.known.next(word, FIRST, attempt_id))
        run.settle(limit_s=61.0)
        pinned = [rank.coordinator.ledger.entries[FIRST].pinned for rank in run.ranks]
        assert pinned == [word is Word.PIN] * 2
    disks = [*run.disks(NODE_TIER).values(), *run.disks(SHARED_TIER).values()]
    assert {decided_on([disk]) for disk in disks} == {decided_on(disks)}


@pytest.mark.parametrize("pinned", [1, 2])
def test_a_part_stays_if_it_was_pinned_after_the_others_were_deleted(pinned: int) -> None:
    """A pin of another step keeps no part of this one."""
    run = Many((0, 1), [file_rules(NODE_TIER, retain_last=1)])
    for step in (1, 2):
        for rank in run.ranks:
            rank.save(step)
        if step == 1:
            run.settle()
    attempt_id = run.ranks[1].coordinator.ledger.entries[FIRST].attempt_id
    assert attempt_id is not None

    def pin_in_time() -> None:
        is_there = [FIRST in run.records(NODE_TIER, at) for at in (0, 1)]
        if is_there == [False, True] and not decided_on([run.disk(NODE_TIER, 1)]):
            decide(run.disk(NODE_TIER, 1), Word.PIN, attempt_id, CheckpointId(pinned, 1))

    run.settle(after_each=pin_in_time)
    assert decided_on([run.disk(NODE_TIER, 1)])
    assert sorted(id.step for id in run.records(NODE_TIER, 1)) == sorted({pinned, 2})
