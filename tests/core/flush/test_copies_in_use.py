"""An open copy is not deleted by a rule while a reader uses it; a person's command deletes it."""

from __future__ import annotations

from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.tasks import CommandKind
from tierfall.core.types.values import CheckpointId

FIRST = CheckpointId(1, 1)


def test_where_room_is_needed_the_oldest_that_nobody_reads_goes() -> None:
    world = World([file_rules("nvme", capacity_bytes=int(3.5 * IMAGE))])
    world.save_all(1, 2, 3)
    world.coordinator.ledger.reading[FIRST] += 1
    world.save_all(4)
    assert world.steps_on("nvme") == [1, 3, 4]
    del world.coordinator.ledger.reading[FIRST]
    world.save_all(5)
    assert world.steps_on("nvme") == [3, 4, 5]


def test_retention_passes_over_it_until_it_was_read() -> None:
    world = World([file_rules("nvme", retain_last=1), file_rules("store")])
    world.save_all(1)
    world.coordinator.ledger.reading[FIRST] += 1
    world.save_all(2, 3)
    assert world.steps_on("nvme") == [1, 3]
    del world.coordinator.ledger.reading[FIRST]
    world.coordinator.deleter.schedule_changed()
    world.settle()
    assert world.steps_on("nvme") == [3]
    assert world.steps_on("store") == [1, 2, 3]


def test_in_memory_it_gives_way_so_that_no_save_waits_for_a_reader() -> None:
    world = World([file_rules("nvme")], memory_images=1)
    world.save_all(1)
    world.coordinator.ledger.reading[FIRST] += 1
    world.save_all(2, 3)
    assert world.steps_on("nvme") == [1, 2, 3]


def test_a_person_deletes_it_all_the_same() -> None:
    world = World([file_rules("nvme")])
    world.save_all(1, 2)
    world.coordinator.ledger.reading[FIRST] += 1
    assert world.order(CommandKind.DELETE, FIRST) == {}
    assert world.steps_on("nvme") == [2]
