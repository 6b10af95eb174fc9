"""A coordinator without an attempt executes a person's commands; it copies and collects nothing."""

from __future__ import annotations

import pytest

from tests.simulation.world import World, file_rules
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.types.values import CheckpointId

ID = CheckpointId(1, 1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A dead trainer left step 2 in memory only, and step 1 on one tier of two."""
    world = World([file_rules("nvme"), file_rules("store")])
    world.save(1)
    world.settle()
    world.stores["store"].delete(ID, attempt=None, known=None)
    world.save(2)
    world.crash()
    monkeypatch.setattr(Coordinator, "start", Coordinator.start_for_commands)
    world.start()
    return world


def test_what_looks_unfinished_is_left_alone(world: World) -> None:
    """It may be a copy that a trainer on another node is just writing."""
    store = world.stores["store"]
    store.write_manifest(CheckpointId(9, 2), world.coordinator.ledger.entries[ID].shard, b"{}")
    world.crash()
    world.start()
    world.settle()
    assert store.files(CheckpointId(9, 2))
