"""Eviction from a stored tier that fills: at its watermarks, and in the order that is asked for."""

from __future__ import annotations

from unittest import mock

from tests.rules import best, order
from tests.simulation.wants import metrics_of
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.errors import UnreachableError
from tierfall.core.scheduler.tasks import PersonsOrder
from tierfall.core.values import CheckpointId
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


def test_what_may_not_go_does_not_stop_a_copy_that_has_room() -> None:
    rules = file_rules("nvme", capacity_bytes=6 * ENTRY, evict_high=0.3, evict_low=0.1)
    world = World([rules])
    for step in range(1, 5):
        world.save(step)
        world.run_all()
        assert world.order(PersonsOrder.PIN, CheckpointId(step, 1)) == {}
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    assert not world.coordinator.ledger.failing


def test_the_best_outlive_newer_ones_where_room_is_short() -> None:
    rules = file_rules("nvme", capacity_bytes=4 * ENTRY, retain=(best("loss", count=2),))
    world = saved(World([rules]), range(1, 11))
    losses = {s: metrics_of(CheckpointId(s, 1)).get("loss") for s in range(1, 11)}
    measured = {s: loss for s, loss in losses.items() if loss is not None and loss == loss}
    ranked = sorted(measured, key=lambda s: (measured[s], -s))
    assert set(ranked[:2]) <= set(world.steps_on("nvme"))


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
    rules = file_rules("nvme", capacity_bytes=10 * ENTRY, evict_high=0.55, evict_low=0.45)
    world = saved(World([rules]), range(1, 6))
    broken = UnreachableError("on purpose")
    with mock.patch.object(StoredTier, "drop", side_effect=broken):
        saved(world, range(6, 7))
    before = world.steps_on("nvme")
    with mock.patch.object(StoredTier, "drop", side_effect=broken) as drop:
        saved(world, range(7, 8))
    assert set(before) <= set(world.steps_on("nvme"))
    assert drop.call_count <= 1
