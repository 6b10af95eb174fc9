"""The scheduler's promises, on a virtual clock and without threads."""

from __future__ import annotations

from tests.simulation.world import IMAGE, World, file_rules


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


# Failures --------------------------------------------------------------------------------------------


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
