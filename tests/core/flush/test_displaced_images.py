"""Images in memory that other ranks of an earlier start sealed: they are continued from, and no rank flushes them."""

from __future__ import annotations

import pytest

from tests.core.flush.test_commits import failing, talk, world
from tests.faults import Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tierfall.core.format.decided import Word
from tierfall.core.types import keys
from tierfall.core.types.errors import StorageFullError, UnreachableError
from tierfall.core.types.values import CheckpointId, Shard

ONE = CheckpointId(1, 1)


def killed_with_all_in_memory(
    places: list[list[int]], node_of: tuple[int, ...], tiers: str = "both", *, pinned: bool = False
) -> Many:
    """All ranks have sealed step 1, which a person may have pinned, and are killed; at the next start each finds the
    images of those ranks."""
    run = world(node_of, tiers)
    for rank in run.ranks:
        rank.save(1)
    talk(run)
    if pinned:
        folder, attempt_id = run.ranks[-1].stores[NODE_TIER].decided, run.ranks[-1].attempt.id
        folder.add(folder.known.next(Word.PIN, ONE, attempt_id))
    run.crash()
    regions = {rank.number: list(rank.memory.regions) for rank in run.ranks}
    for rank, there in zip(run.ranks, places, strict=True):
        rank.memory.regions = [region for number in there for region in regions[number]]
        for region in rank.memory.regions:
            region._memory = rank.memory
    run.start()
    return run


PLACES = [
    ([[1], [0]], (0, 0)),
    ([[0, 1], []], (0, 0)),
    ([[], [0, 1]], (0, 0)),
    ([[], [0, 1]], (0, 1)),
    ([[2, 0], [], [1]], (0, 0, 1)),
]


@pytest.mark.parametrize(("places", "node_of"), PLACES)
def test_images_of_other_ranks_are_continued_from_and_stay_until_something_newer_is_on_a_tier(
    places: list[list[int]], node_of: tuple[int, ...]
) -> None:
    run = killed_with_all_in_memory(places, node_of)
    assert run.started_from == ONE
    run.settle()
    count = len(node_of)
    assert run.committed(SHARED_TIER) == set(), "nobody flushes what another rank has saved"
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert sum(len(rank.memory.regions) for rank in run.ranks) == count
    for rank in run.ranks:
        rank.ordinal = 1
        rank.save(2)
    run.settle()
    newer = {CheckpointId(2, 2)}
    assert run.committed(SHARED_TIER) == newer
    assert all(rank.sealed() == newer for rank in run.ranks), "what was found is let go"


def images_on(run: Many, tier: str) -> dict[str, bytes]:
    prefix = keys.step_prefix("run", ONE)
    return {
        key.removeprefix(prefix): bytes(data)
        for disk in run.disks(tier).values()
        for key, data in disk._objects.items()
        if key.startswith(prefix) and keys.parse_shard(key.removeprefix(prefix)) is not None
    }


def test_no_rank_waits_to_flush_what_only_a_tier_has_whole_that_another_rank_cannot_reach() -> None:
    """A lost rank's part is on the shared tier alone, which all ranks go without: nobody can bring that part."""
    run = world((0, 1))
    run.ranks[1].troubles[NODE_TIER].strike(failing(Operation.CREATE, StorageFullError))
    for rank in run.ranks:
        rank.save(1)
    run.settle(limit_s=5)
    assert run.committed(SHARED_TIER) == {ONE}
    assert run.committed(NODE_TIER) == set()
    run.crash(nodes_lost=[0])
    run.unopened = {SHARED_TIER}
    run.ranks[1].troubles[SHARED_TIER].down = True
    run.start()
    assert run.ranks[1].sealed() == {ONE}
    assert not any(rank.coordinator.owed_copies() for rank in run.ranks)
    run.settle()
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    run.crash()
    run.ranks[1].troubles[SHARED_TIER].down = False
    run.start()
    assert run.started_from == ONE
    run.settle()
    assert run.committed(NODE_TIER) == {ONE}


def test_what_is_flushed_from_a_disk_names_all_parts_though_memory_has_those_of_others() -> None:
    """Step 1 is on every node's disk, not on the shared tier. One machine's memory is lost, and on the other the ranks
    change places: what a rank finds in its memory is another's part."""
    run = world((0, 0, 1), "both")
    for rank in run.ranks:
        rank.troubles[SHARED_TIER].strike(failing(Operation.CREATE, UnreachableError))
        rank.save(1)
    run.settle()
    assert all(ONE in rank.committed(NODE_TIER) for rank in run.ranks)
    run.crash(nodes_lost=[1])
    first, second, _ = run.ranks
    first.memory, second.memory = second.memory, first.memory
    run.start()
    assert run.started_from == ONE
    run.settle()
    named = {keys.parse_shard(file.name) for file in run.records(SHARED_TIER, 0)[ONE].files}
    assert named >= {Shard(rank, 3) for rank in range(3)}
    assert len(images_on(run, SHARED_TIER)) == 2 * 3
