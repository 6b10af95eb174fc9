"""Eviction from a stored tier at its watermarks, in the configured order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.memory_backend import MemoryBackend
from tests.rules import best, order, tagged
from tests.simulation.wants import metrics_of
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.scheduler.deletion.deleter import Deleter
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types.errors import (
    AccessDeniedError,
    CapacityError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Codec
from tierfall.tiers.stored import StoredTier

ENTRY = int(1.1 * IMAGE)
"""More than a copy takes with its records."""


def saved(world: World, steps: range) -> World:
    for step in steps:
        world.save(step)
        world.run_all()
    return world


def test_a_tier_above_its_high_watermark_is_brought_down_to_the_low_one() -> None:
    rules = file_rules("nvme", capacity_bytes=10 * ENTRY, evict_high=0.8, evict_low=0.4)
    world = saved(World([rules]), range(1, 8))
    assert world.steps_on("nvme") == list(range(1, 8))
    saved(world, range(8, 10))
    held = world.steps_on("nvme")
    assert held[-1] == 9
    assert held == list(range(held[0], 10))
    assert len(held) < 6
    used = world.coordinator.ledger.used_bytes("nvme")
    assert used <= 0.8 * 10 * ENTRY


def test_without_watermarks_only_as_much_goes_as_is_needed() -> None:
    world = saved(World([file_rules("nvme", capacity_bytes=4 * ENTRY)]), range(1, 8))
    held = world.steps_on("nvme")
    assert held == list(range(held[0], 8))
    assert len(held) in (3, 4)


def test_a_tier_that_packs_holds_as_many_as_fit_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is expected to take what it takes in memory, the others as much as the one before them."""
    monkeypatch.setattr(World, "image", lambda world, id: bytes([id.step]) * IMAGE)
    rules = file_rules("nvme", capacity_bytes=int(1.2 * IMAGE))
    world = saved(World([rules], codecs={"nvme": Codec.ZSTD}), range(1, 8))
    assert world.steps_on("nvme") == list(range(1, 8))
    used = world.coordinator.ledger.used_bytes("nvme")
    assert IMAGE / 5 < used <= int(1.2 * IMAGE)
    held = saved(world, range(8, 40)).steps_on("nvme")
    assert held == list(range(held[0], 40)), "it fills up, and the oldest go"
    assert held[0] > 1
    assert world.coordinator.ledger.used_bytes("nvme") <= int(1.2 * IMAGE)


def test_a_disk_that_is_full_below_its_capacity_gives_up_one_copy_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How much it lacks is not known: the watermarks speak of the capacity, which is not reached."""
    rules = file_rules("nvme", capacity_bytes=20 * ENTRY, evict_high=0.9, evict_low=0.2)
    world = saved(World([rules]), range(1, 8))
    real, refusals = world.stores["nvme"].create_shard, [1, 2]

    def create_shard(*arguments: Any) -> Any:
        if refusals:
            refusals.pop()
            raise StorageFullError("no space")
        return real(*arguments)

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
    world.coordinator.ledger.set_knows_good()
    assert world.steps_on("nvme") == []
    owed = {(id.step, tier) for id, tier in world.coordinator.owed_copies()}
    assert owed == {(1, "nvme"), (2, "nvme")}
    world.settle()
    assert world.steps_on("nvme") == [2]
    assert not world.coordinator.ledger.failing


def test_what_a_failed_try_left_and_cannot_be_removed_is_reported_to_keep_the_tier_full() -> None:
    world = saved(
        World([file_rules("nvme", capacity_bytes=int(1.5 * ENTRY)), file_rules("store")]),
        range(1, 3),
    )
    for key in ("run/step-00000002-a0001/commit.json", "run/latest"):
        world.disks["nvme"].delete(key)
    world.crash()
    world.start()
    world.coordinator.ledger.set_knows_good()
    with mock.patch.object(MemoryBackend, "delete_some", side_effect=AccessDeniedError("kept")):
        world.settle(limit_s=1.0)
        assert isinstance(world.coordinator.ledger.failing["nvme"], CapacityError)
    world.settle()
    assert world.steps_on("nvme") == [2], "it is removed later"


def test_what_may_not_go_does_not_stop_a_copy_that_has_room() -> None:
    rules = file_rules("nvme", capacity_bytes=6 * ENTRY, evict_high=0.3, evict_low=0.1)
    world = World([rules])
    for step in range(1, 5):
        world.save(step)
        world.run_all()
        assert world.order(CommandKind.PIN, CheckpointId(step, 1)) == {}
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    assert not world.coordinator.ledger.failing


@pytest.mark.parametrize(
    ("read", "goes"), [({}, 2), ({"pfs": 1, "store": 100}, 1), ({"pfs": 100, "store": 1}, 2)]
)
def test_what_is_quickly_read_back_from_elsewhere_goes_first_as_far_as_that_was_measured(
    read: dict[str, int], goes: int
) -> None:
    nvme = file_rules("nvme", capacity_bytes=4 * ENTRY)
    pfs = file_rules("pfs", shared=True, flush_every=2)
    world = World([nvme, pfs, file_rules("store", shared=True)])
    for tier, bytes_per_s in read.items():
        world.coordinator.rates.note_read(tier, bytes_per_s, 1.0)
    with mock.patch.object(world.coordinator.rates, "on_ended"):  # what this machine shows
        saved(world, range(1, 6))
    assert world.steps_on("nvme") == [step for step in range(1, 6) if step != goes]


def loss_of(step: int, attempt: int) -> float:
    return metrics_of(CheckpointId(step, attempt)).get("loss", math.nan)


def is_best_of_six(step: int) -> bool:
    """Of this one and two more, and three that a second start saves."""
    others = [loss_of(step + n, 1 if n < 3 else 2) for n in range(1, 6)]
    return all(loss_of(step, 1) < other for other in others)


def test_the_best_outlives_older_and_newer_ones_where_room_is_short() -> None:
    """All are young enough to stay at first; then the best is the one that a rule still wants."""
    chosen = next(step for step in range(1, 200) if is_best_of_six(step))
    rules = file_rules("nvme", capacity_bytes=4 * ENTRY)
    world = saved(World([rules]), range(chosen, chosen + 3))
    world.crash()
    world.rules = (world.rules[0], replace(rules, retain=(best("loss"), tagged("no such tag"))))
    with mock.patch.object(Deleter, "plan_tier"):  # eviction comes first
        world.start()
        world.started_from, world.ordinal = CheckpointId(chosen + 2, 1), 3
        world.coordinator.ledger.continue_from(world.started_from, attempt=2)
        saved(world, range(chosen + 3, chosen + 6))
    held = world.steps_on("nvme")
    assert held[0] == chosen
    assert len(held) in (3, 4)


def test_the_order_that_is_asked_for_says_what_goes() -> None:
    """Of 1 and 2, on nvme, the store holds 2 alone: it is the cheaper one to lose, and 1 the older."""
    left = {}
    for name in ("cheapest", "oldest"):
        world = World(
            [
                file_rules("nvme", capacity_bytes=3 * ENTRY, evict=order(name)),
                file_rules("store", shared=True, flush_every=2),
            ]
        )
        saved(world, range(1, 5))
        left[name] = world.steps_on("nvme")
    assert left == {"cheapest": [1, 3, 4], "oldest": [2, 3, 4]}


def test_a_copy_that_cannot_be_deleted_is_not_paid_for_with_others() -> None:
    rules = file_rules("nvme", capacity_bytes=10 * ENTRY, evict_high=0.6, evict_low=0.5)
    world = saved(World([rules], memory_images=4), range(1, 7))
    assert world.steps_on("nvme") == [1, 2, 3, 4, 5, 6]
    broken = UnreachableError("on purpose")
    with mock.patch.object(StoredTier, "delete", side_effect=broken) as drop:
        saved(world, range(7, 9))
    assert {call.args[0].step for call in drop.call_args_list} == {1, 2}
    assert world.steps_on("nvme") == [1, 2, 3, 4, 5, 6, 7, 8]
