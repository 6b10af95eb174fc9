"""Eviction from a stored tier at its watermarks, in the configured order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.types.errors import (
    StorageFullError,
    UnreachableError,
)
from tierfall.tiers.stored import StoredTier

ENTRY = int(1.1 * IMAGE)
"""More than a copy takes with its records."""


def saved(world: World, steps: range) -> World:
    for step in steps:
        world.save(step)
        world.run_all()
    return world


def test_a_disk_that_is_full_below_its_capacity_gives_up_one_copy_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How much it lacks is not known: the watermarks speak of the capacity, which is not reached."""
    rules = file_rules("nvme", capacity_bytes=20 * ENTRY, evict_high=0.9, evict_low=0.2)
    world = saved(World([rules]), range(1, 8))
    real, refusals = world.stores["nvme"].create_shard, [1, 2]

    def create_shard(*arguments: Any, **more: Any) -> Any:
        if refusals:
            refusals.pop()
            raise StorageFullError("no space")
        return real(*arguments, **more)

    monkeypatch.setattr(world.stores["nvme"], "create_shard", create_shard)
    saved(world, range(8, 9))
    assert not refusals
    assert world.steps_on("nvme") == [3, 4, 5, 6, 7, 8]


def test_what_a_failed_try_left_of_a_later_copy_does_not_keep_an_earlier_one_off_for_ever() -> None:
    """The tier takes them in the order in which they were saved, and what is left of the second fills it."""
    world = saved(
        World([file_rules("nvme", capacity_bytes=int(1.5 * ENTRY)), file_rules("store")]),
        range(1, 3),
    )
    assert (world.steps_on("nvme"), world.steps_on("store")) == ([2], [1, 2])
    for key in ("run/step-00000002-a0001/commit.json", "run/latest"):
        world.disks["nvme"].delete(key)
    world.crash()
    world.start()
    world.coordinator.begin_anew()
    assert world.steps_on("nvme") == []
    owed = {(id.step, tier) for id, tier in world.coordinator.owed_copies()}
    assert owed == {(1, "nvme"), (2, "nvme")}
    world.settle()
    assert world.steps_on("nvme") == [2]
    assert not world.coordinator.ledger.failing


def test_a_copy_that_cannot_be_deleted_is_not_paid_for_with_others() -> None:
    rules = file_rules("nvme", capacity_bytes=10 * ENTRY, evict_high=0.6, evict_low=0.5)
    world = saved(World([rules], memory_images=4), range(1, 7))
    assert world.steps_on("nvme") == [1, 2, 3, 4, 5, 6]
    broken = UnreachableError("on purpose")
    with mock.patch.object(StoredTier, "delete", side_effect=broken) as drop:
        saved(world, range(7, 9))
    assert {call.args[0].step for call in drop.call_args_list} == {1, 2}
    assert world.steps_on("nvme") == [1, 2, 3, 4, 5, 6, 7, 8]
