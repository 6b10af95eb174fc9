"""Damaged copies: reported, never counted, and never the reason to delete another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.memory_backend import MemoryBackend
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.tasks import (
    CommandKind,
    DeleteCopy,
)
from tierfall.core.types.errors import BackendError
from tierfall.core.types.values import CheckpointId, Codec
from tierfall.tiers.stored import StoredTier

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(2, 1)
CODECS = [Codec.NONE, Codec.ZSTD, Codec.PLANES]


def saved(steps: Iterable[int], *rules: object, **members: object) -> World:
    """A run that has saved these steps, and whose memory holds none of them any more."""
    world = World(rules, **members)  # type: ignore[arg-type]
    for step in steps:
        world.save(step)
        world.settle()
        world.started_from = CheckpointId(step, 1)
    world.crash()
    world.memory.regions.clear()
    return world


def flip(disk: MemoryBackend, step: int = 1, at: int = -1, name: str = ".safetensors") -> None:
    """Change a bit of what lies on a disk, and tell nobody."""
    folder = f"run/step-{step:08d}-a0001/"
    for key in [k for k in disk._objects if k.startswith(folder) and name in k]:
        data = bytearray(disk._objects[key])
        data[at] ^= 1
        disk._objects[key] = memoryview(bytes(data))


def damage(world: World, tier: str, id: CheckpointId = FIRST) -> str | None:
    return world.coordinator.ledger.entries[id].damage.get(tier)


# Found by another process ------------------------------------------------------------------------


def test_damage_that_another_process_has_just_found_stops_a_deletion_by_rule() -> None:
    """Also one that is under way already, and if this process has read the list of the tier a moment before."""
    world = World([file_rules("nvme", retain_last=2)], memory_images=3)
    world.save_all(1, 2)
    store = world.stores["nvme"]
    other = StoredTier(name="nvme", run="run", backend=world.disks["nvme"])
    world.save(3)
    while not (drops := [task for task in world.tasks if isinstance(task, DeleteCopy)]):
        if world.tasks:
            world.run(world.tasks[0])
        world.step()
    del store.decided.read  # by which simulations, whose clock is virtual, always read anew
    store.decided.read()
    other.note_damaged(store.read_commit(SECOND), "a flipped bit")
    world.run(drops[0])
    world.settle()
    assert store.is_committed(FIRST)
    assert damage(world, "nvme", SECOND)


# Removed in mid-run, and nobody said so -----------------------------------------------------------


def remove(disk: MemoryBackend, step: int, name: str = "") -> None:
    """Remove what is in the folder of a step, or the files with that in their names."""
    folder = f"run/step-{step:08d}-a0001/"
    for key in [k for k in disk._objects if k.startswith(folder) and name in k]:
        del disk._objects[key]


def whole_on(world: World, tier: str) -> list[int]:
    copies = world.stores[tier].list().copies
    return sorted(copy.id.step for copy in copies if copy.damage is None)


def saved_here(steps: Iterable[int], *rules: object, **members: object) -> World:
    world = World(rules, **members)  # type: ignore[arg-type]
    world.save_all(*steps)
    return world


def test_what_was_removed_is_no_reason_to_drop_the_last_one_for_room() -> None:
    world = saved_here((1, 2), file_rules("pfs", capacity_bytes=int(2.5 * IMAGE)))
    remove(world.disks["pfs"], 2)
    seen: list[list[int]] = []
    world.sees = lambda task: seen.append(whole_on(world, "pfs"))
    world.save_all(3)
    assert all(seen), "one is there at any moment"
    assert whole_on(world, "pfs") == [1, 3], "what has gone takes no room"


def test_a_look_that_fails_drops_nothing() -> None:
    world = saved_here((1, 2), file_rules("pfs", retain_last=2))
    disk = world.disks["pfs"]
    scan = disk.scan

    def fails(prefix: str) -> object:
        if "step-" in prefix:
            raise BackendError("no answer", retryable=True)
        return scan(prefix)

    world.save(3)
    while not any(isinstance(task, DeleteCopy) for task in world.tasks):
        world.run_one()
        world.step()
    disk.scan = fails  # type: ignore[method-assign, assignment]
    for _ in range(20):
        world.run_one()
        world.step()
    disk.scan = scan  # type: ignore[method-assign]
    assert whole_on(world, "pfs") == [1, 2, 3]
    world.settle()
    assert whole_on(world, "pfs") == [2, 3]


# Damaged, and room is needed -----------------------------------------------------------------------


def two_with_damage(restored: CheckpointId = FIRST, **members: Any) -> World:
    """A start on a tier with room for two copies, of which the newer one is damaged."""
    world = saved((1, 2), file_rules("pfs", capacity_bytes=int(2.5 * IMAGE)), **members)
    flip(world.disks["pfs"], 2)
    world.started_from = restored
    world.start()
    ledger = world.coordinator.ledger
    ledger.continue_from(restored, attempt=2)
    ledger.entries[FIRST].verified |= {"pfs"}
    world.coordinator.found_damage("pfs", SECOND, "does not match")
    return world


def test_a_damaged_copy_goes_first_where_room_is_needed() -> None:
    world = two_with_damage()
    world.save_all(3)
    assert world.steps_on("pfs") == [1, 3]
    world.save_all(4, 5)
    assert world.steps_on("pfs") == [4, 5]
    assert not world.coordinator.errors


@pytest.mark.parametrize("why", ["pinned", "restored", "nothing good", "another half"])
def test_a_damaged_copy_that_something_may_come_of_stays_and_the_error_names_it(why: str) -> None:
    world = two_with_damage(SECOND if why == "restored" else FIRST)
    entries = world.coordinator.ledger.entries
    match why:
        case "pinned":
            world.order(CommandKind.PIN, SECOND)
        case "nothing good":
            entries[FIRST].verified = frozenset()
            flip(world.disks["pfs"], 1)
        case "another half":
            entries[SECOND].note_damage("other", "does not match", repairable=True)
    if why == "restored":
        world.order(CommandKind.PIN, FIRST)
    world.save_all(3)
    assert SECOND.step in world.steps_on("pfs")
    (error,) = world.coordinator.errors
    assert "tierfall rm ID" in str(error)
    assert "not deleted without a command: " in str(error)
    assert "2@1" in str(error)
