"""Two lanes that copy one checkpoint from the same stored tier: each begins with the chunk that the other has read."""

from __future__ import annotations

from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.tasks import CopyRun, Outcome
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, Codec

FIRST = CheckpointId(1, 1)


def world_from_nvme(codec: Codec = Codec.NONE, *, run_bytes_min: int = 0) -> World:
    """Step 1 lies on ``nvme`` alone; ``one`` and ``two`` are owed a copy of it, and memory is gone."""
    rules = [file_rules(name) for name in ("nvme", "one", "two")]
    world = World(rules, codecs={"two": codec}, run_bytes_min=run_bytes_min)
    world.save(1)
    for tier in ("nvme", "one"):
        while any(task.tier == tier for task in world.tasks):
            carry_out(world, tier)
    for backend in (world.disks["one"], world.disks["two"]):
        for stored in list(backend.scan("")):
            backend.delete(stored.key)
    world.crash()
    world.memory.regions.clear()
    world.start()
    world.step()
    assert world.steps_on("nvme") == [1]
    assert world.steps_on("one") == world.steps_on("two") == []
    return world


def carry_out(world: World, tier: str, chunks: tuple[int, int] | None = None) -> None:
    """Carry out the oldest task of a tier, or the one that brings these chunks."""
    task = next(
        t
        for t in world.tasks
        if t.tier == tier
        and (chunks is None or (isinstance(t, CopyRun) and (t.first, t.stop) == chunks))
    )
    world.tasks.remove(task)
    world.coordinator.post(world.runner.run(task))
    world.step()


def in_hand(world: World, tier: str) -> list[tuple[int, int]]:
    """Which chunks workers of a tier are told to bring now."""
    return [(t.first, t.stop) for t in world.tasks if isinstance(t, CopyRun) and t.tier == tier]


def both_are_right(world: World) -> None:
    world.settle()
    for tier in ("one", "two"):
        assert world.steps_on(tier) == [1]
        world.check(tier)
        assert world.coordinator.lanes[tier].edge_bytes == {"nvme": IMAGE}
    leases = world.coordinator.ledger.entries[FIRST].leases
    assert not any(leases.values()), leases


def test_a_later_lane_begins_with_what_the_other_has_in_hand() -> None:
    world = world_from_nvme()
    for _ in range(3):  # the image is begun, and two chunks of four are brought
        carry_out(world, "one")
    assert in_hand(world, "one") == [(2, 3), (3, 4)]
    carry_out(world, "two")
    assert in_hand(world, "two") == [(3, 4), (2, 3)]
    carry_out(world, "two")
    assert in_hand(world, "two") == [(2, 3), (0, 1)]
    both_are_right(world)


def test_a_chunk_that_failed_on_one_tier_is_brought_again_there_alone() -> None:
    world = world_from_nvme()
    carry_out(world, "one")
    carry_out(world, "two")
    task = next(t for t in world.tasks if isinstance(t, CopyRun) and t.tier == "two")
    world.tasks.remove(task)
    world.coordinator.post(Outcome(task=task, error=UnreachableError("on purpose")))
    both_are_right(world)
