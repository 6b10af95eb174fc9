"""After a start nothing is known to be good: what is read then, so that a tier makes room, and never by a bad copy."""

from __future__ import annotations

import pytest

from tests.simulation.world import IMAGE, World, decided_on, file_rules
from tierfall.core.flush.tasks import Command, CommandKind
from tierfall.core.format.decided import Word
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import TierRules

ROOM_FOR_THREE = int(3.85 * IMAGE)


def begun_anew(*rules: TierRules, restored: int, read_on: str, lost_memory: bool = True) -> World:
    """Save steps 1 to 3, end, and restore one of them, of which ``read_on`` was read whole."""
    world = World(rules)
    world.save_all(1, 2, 3)
    world.crash()
    if lost_memory:
        world.take_other_memory()
    world.start()
    world.settle()
    id = CheckpointId(restored, 1)
    world.coordinator.verifier.on_restored(id, (read_on,))
    world.coordinator.ledger.continue_from(id, attempt=world.attempt.number)
    world.started_from = id
    world.step()
    return world


def test_a_full_tier_makes_room_after_a_rollback() -> None:
    """What the first save leaves behind is the newest there, and counts for nothing then."""
    pfs = file_rules("pfs", shared=True, capacity_bytes=ROOM_FOR_THREE)
    world = begun_anew(file_rules("nvme"), pfs, restored=2, read_on="nvme")
    world.settle()
    world.save_all(4, 5, 6)
    assert world.steps_on("pfs") == [4, 5, 6]


@pytest.mark.parametrize("kind", [CommandKind.PIN, CommandKind.DELETE])
def test_a_tier_that_is_away_for_a_day_holds_up_no_other_and_gets_what_its_list_lacks(
    kind: CommandKind,
) -> None:
    world = World([file_rules("nvme", retain_last=2), file_rules("store", shared=True)])
    world.save_all(1, 2)
    away, scan = True, world.disks["store"].scan

    def no_answer(prefix: str) -> object:
        if away:
            raise UnreachableError("no answer")
        return scan(prefix)

    world.disks["store"].scan = no_answer  # type: ignore[method-assign, assignment]
    answer: list[dict[str, BaseException]] = []
    world.coordinator.post(Command(kind=kind, id=CheckpointId(1, 1), on_answer=answer.append))
    for step in (3, 4, 5):
        world.save(step)
        world.settle(limit_s=100.0)
    kept = [1] if kind is CommandKind.PIN else []
    assert world.steps_on("nvme") == [*kept, 4, 5]
    away = False
    world.settle(limit_s=3000.0)
    (word,) = {e.word for e in decided_on([world.disks["store"]])}
    assert word is (Word.PIN if kind is CommandKind.PIN else Word.DELETED)
    assert answer
