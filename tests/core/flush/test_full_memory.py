"""Full host memory: no image is given up in vain, and what a skipped save does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.flush.test_superseding import (
    FIRST,
    carry_out,
    give_way,
    rest,
    superseding,
    until,
)
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.tasks import (
    Command,
    CommandKind,
    CopyRun,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome, Shard, WhenFull
from tierfall.tiers.host import HostTier
from tierfall.tiers.image_file import room_for

# Whether it would make room --------------------------------------------------------------------------

RECORDS = 8192
ROOM = room_for(image_bytes=IMAGE, records_bytes=RECORDS)


@pytest.mark.parametrize(
    ("pinned", "image_bytes", "records_bytes", "given_up"),
    [
        (2, 2 * ROOM - RECORDS, RECORDS, [1, 3]),
        (3, 2 * ROOM - RECORDS, RECORDS, [1, 2]),
        (2, IMAGE, RECORDS, [1]),
        (2, 3 * ROOM - RECORDS, RECORDS + 4096, []),  # a page more than there would be
    ],
)
def test_nothing_is_given_up_where_that_would_not_make_room(
    tmp_path: Path, pinned: int, image_bytes: int, records_bytes: int, given_up: list[int]
) -> None:
    host = HostTier(
        name="host",
        run="run",
        folder=tmp_path,
        slot=0,
        shard=Shard(0, 1),
        capacity_bytes=4 * ROOM,
    )
    world = rest(superseding())
    world.coordinator._admissions._host = host
    for step in (1, 2, 3, 4):
        region, _ = world.ask_for_region(step, records_bytes=RECORDS)
        world.seal(world.begin(step, region))
    id = CheckpointId(pinned, 1)
    pin = Command(kind=CommandKind.PIN, id=id, on_answer=lambda failed: None)
    world.coordinator.post(pin)
    answer = world.ask_for_region(5, image_bytes=image_bytes, records_bytes=records_bytes)
    lost = [id.step for id, h in world.handles.items() if h.outcome is SaveOutcome.SUPERSEDED]
    assert lost == given_up
    assert bool(answer and answer[0]) == bool(given_up)
    host.close(keep=False)


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
