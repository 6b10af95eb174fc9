"""The scheduler's promises, on a virtual clock and without threads."""

from __future__ import annotations

from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.types.errors import (
    CaptureError,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome


def test_chunks_follow_the_watermark_before_the_capture_ends() -> None:
    world = World([file_rules("nvme")])
    region, _ = world.ask_for_region(1)
    snapshot = world.begin(1, region)
    world.advance(snapshot, 2)
    world.settle()
    lane = world.coordinator.lanes["nvme"]
    assert lane.active is not None
    assert lane.active.done == 2  # exactly what is final, no more
    assert world.steps_on("nvme") == []
    world.seal(snapshot)
    world.settle()
    assert world.steps_on("nvme") == [1]
    world.check("nvme")


def test_a_failed_capture_leaves_nothing_on_any_tier() -> None:
    world = World([file_rules("nvme")])
    region, _ = world.ask_for_region(1)
    snapshot = world.begin(1, region)
    world.advance(snapshot, 2)
    world.settle()
    world.fail_capture(snapshot, CaptureError("changed"))
    world.settle()
    assert snapshot.handle.outcome is SaveOutcome.FAILED
    assert world.memory.regions == []
    assert world.stores["nvme"].files(snapshot.id) == ()
    assert world.disks["nvme"].discard_unfinished("") == 0
    world.save(2)
    world.settle()
    assert world.steps_on("nvme") == [2]


# Failures --------------------------------------------------------------------------------------------


def test_a_copy_whose_source_is_damaged_comes_from_the_next_one() -> None:
    world = World([file_rules("nvme"), file_rules("store", flush_every=1)], memory_images=1)
    world.save(1)
    while world.steps_on("nvme") != [1]:
        # the store's lane must not have finished: hold its tasks back
        own = [t for t in world.tasks if t.tier == "nvme"]
        task = own[0] if own else world.tasks[0]
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    lane = world.coordinator.lanes["store"]
    assert lane.active is not None
    assert lane.active.done < 4
    region = next(iter(world.memory.regions))
    region.image[DAMAGE] ^= 1
    entry = world.coordinator.ledger.entries[CheckpointId(1, 1)]
    entry.adopted = True  # memory of an earlier start is checked before it is believed
    world.settle()
    assert world.steps_on("store") == [1]
    world.check("store")


DAMAGE = IMAGE - 1


def test_a_copy_with_no_good_source_is_given_up_and_reported() -> None:
    world = World([file_rules("nvme")])
    handle = world.save(1)
    world.crash()
    world.start()
    world.memory.regions[0].image[DAMAGE] ^= 1
    world.settle()
    assert world.steps_on("nvme") == []
    assert world.door.counts["given_up_copies"] == {"nvme": 1}
    assert "no tier has a good copy" in str(world.coordinator.errors[-1])
    assert not handle.done("nvme")


# Restarts --------------------------------------------------------------------------------------------


def test_an_abandoned_line_stays_where_the_new_one_is_not_as_safe() -> None:
    world = World([file_rules("nvme"), file_rules("pfs", shared=True, flush_every=2)])
    for step in (1, 2, 3, 4):
        world.save(step)
        world.settle()
    world.crash()
    world.start()
    world.started_from = CheckpointId(2, 1)
    world.ordinal = 2
    world.save(3)  # ordinal 3: not flushed to pfs
    world.settle()
    assert [str(c.id) for c in world.stores["nvme"].list().copies] == ["1@1", "2@1", "3@2"]
    assert [str(c.id) for c in world.stores["pfs"].list().copies] == ["2@1", "4@1"]
