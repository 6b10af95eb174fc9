"""A person's commands and concurrent events: no promise to the person is undone."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tests.simulation.world import IMAGE, World, decided_on, file_rules
from tierfall.core.flush.tasks import (
    AddDecided,
    Command,
    CommandKind,
    DeleteCopy,
    Task,
)
from tierfall.core.format.decided import Word
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import StepError
from tierfall.core.types.values import CheckpointId
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
