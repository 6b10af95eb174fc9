"""Full host memory: no image is given up in vain, and what a skipped save does."""

from __future__ import annotations

from tests.core.flush.test_superseding import (
    FIRST,
    carry_out,
    give_way,
    until,
)
from tests.simulation.world import World, file_rules
from tierfall.core.flush.tasks import (
    CopyRun,
)
from tierfall.core.types.values import WhenFull

# Skipping --------------------------------------------------------------------------------------------


def test_where_saves_are_skipped_a_copy_is_read_from_storage_so_that_memory_is_free() -> None:
    world = World(
        [file_rules("nvme"), file_rules("store")], memory_images=2, when_full=WhenFull.SKIP
    )
    world.save(1)
    world.save(2)
    assert world.ask_for_region(3)[0] is None
    until(world, CopyRun, "store")
    while world.steps_on("nvme") != [1]:
        carry_out(world, lambda task: task.tier == "nvme")
    while world.coordinator.ledger.entries[FIRST].leases.get("host"):
        carry_out(world, lambda task: task.tier == "store")
    left = {t.source.tier for t in world.tasks if isinstance(t, CopyRun) and t.id == FIRST}
    assert left == {"nvme"}, "the rest of it"
    assert give_way(world, 3) is not None
    world.settle()
    assert world.steps_on("store") == [1, 2]
    world.check("store")
