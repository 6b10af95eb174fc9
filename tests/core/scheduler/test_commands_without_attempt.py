"""A coordinator without an attempt executes a person's commands; it copies and collects nothing."""

from __future__ import annotations

import pytest

from tests.simulation.world import World, file_rules
from tierfall.core.scheduler.coordinator import Coordinator
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types.values import CheckpointId

ID = CheckpointId(1, 1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A dead trainer left step 2 in memory only, and step 1 on one tier of two."""
    world = World([file_rules("nvme"), file_rules("store")])
    world.save(1)
    world.settle()
    world.stores["store"].delete(ID, attempt=None)
    world.save(2)
    world.crash()
    monkeypatch.setattr(Coordinator, "start", Coordinator.start_for_commands)
    world.start()
    return world


def test_nothing_is_copied_though_it_is_owed(world: World) -> None:
    world.settle()
    assert (world.steps_on("nvme"), world.steps_on("store")) == ([1], [])
    assert not world.coordinator.busy()
    owed = {(id.step, tier) for id, tier in world.coordinator.owed_copies()}
    assert owed == {(1, "store"), (2, "nvme"), (2, "store")}
    assert world.coordinator.counters.flush_failures == 0


def test_orders_are_carried_out_and_nothing_else(world: World) -> None:
    assert world.order(CommandKind.PIN, ID) == {}
    assert world.stores["nvme"].marks(ID) == {"pin"}
    assert world.order(CommandKind.UNPIN, ID) == {}
    assert world.order(CommandKind.DELETE, ID) == {}
    assert (world.steps_on("nvme"), world.steps_on("store")) == ([], [])


def test_what_looks_unfinished_is_left_alone(world: World) -> None:
    """It may be a copy that a trainer on another node is just writing."""
    store = world.stores["store"]
    store.write_manifest(CheckpointId(9, 2), world.coordinator.ledger.entries[ID].shard, b"{}")
    world.crash()
    world.start()
    world.settle()
    assert store.files(CheckpointId(9, 2))
