"""Images that ranks of an earlier start sealed are flushed by the ranks of this one; some ranks have none."""

from __future__ import annotations

import pytest

from tests.core.scheduler.test_commits import failing, folder_is_empty, talk, world
from tests.faults import Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.rank import image_of
from tierfall.core.format.decided import Word
from tierfall.core.scheduler.ledger.tasks import CommandKind
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


def images_on(run: Many, tier: str) -> dict[str, bytes]:
    prefix = keys.step_prefix("run", ONE)
    return {
        key.removeprefix(prefix): bytes(data)
        for disk in run.disks(tier).values()
        for key, data in disk._objects.items()
        if key.startswith(prefix) and keys.parse_shard(key.removeprefix(prefix)) is not None
    }


PLACES = [
    ([[1], [0]], (0, 0)),
    ([[0, 1], []], (0, 0)),
    ([[], [0, 1]], (0, 0)),
    ([[], [0, 1]], (0, 1)),
    ([[2, 0], [], [1]], (0, 0, 1)),
]


@pytest.mark.parametrize(("places", "node_of"), PLACES)
def test_all_parts_come_to_each_tier_and_are_one_checkpoint_there(
    places: list[list[int]], node_of: tuple[int, ...]
) -> None:
    run = killed_with_all_in_memory(places, node_of)
    assert run.started_from == ONE
    run.settle()
    count = len(node_of)
    for tier in (NODE_TIER, SHARED_TIER):
        found = images_on(run, tier)
        for rank in range(count):
            assert found[keys.shard_name(Shard(rank, count))] == image_of(ONE, rank)
        assert all(ONE in rank.committed(tier) for rank in run.ranks)
    named = [file.name for file in run.records(SHARED_TIER, 0)[ONE].files]
    assert named == sorted(named, key=lambda name: keys.parse_shard(name).rank)  # type: ignore[union-attr]
    for node in set(node_of):
        here = [there for there, on in zip(places, node_of, strict=True) if on == node and there]
        assert (ONE in run.records(NODE_TIER, node)) == bool(here), "a record is where images are"
    assert not any(rank.coordinator.busy() for rank in run.ranks)
    assert sum(len(rank.memory.regions) for rank in run.ranks) == count, "nothing newer is durable"
    for rank in run.ranks:
        rank.ordinal = 1
        rank.save(2)
    run.settle()
    newer = {CheckpointId(2, 2)}
    assert all(rank.sealed() == newer for rank in run.ranks), "what was adopted is let go"


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


@pytest.mark.parametrize("places", [[[1], [0]], [[], [0, 1]]])
def test_a_deletion_reaches_every_part_in_memory(places: list[list[int]]) -> None:
    run = killed_with_all_in_memory(places, (0, 1))
    run.settle()
    answer = run.ranks[0].order(CommandKind.DELETE, ONE)
    run.settle()
    assert answer == [{}]
    assert not any(rank.memory.regions for rank in run.ranks)
    assert folder_is_empty(run, NODE_TIER)
    assert folder_is_empty(run, SHARED_TIER)


@pytest.mark.parametrize(("places", "node_of"), PLACES[-2:])
def test_all_ranks_know_of_a_pin_whoever_has_the_image_now(
    places: list[list[int]], node_of: tuple[int, ...]
) -> None:
    """Else they would not agree on what a tier is owed, and wait for each other's parts for ever."""
    run = killed_with_all_in_memory(places, node_of, pinned=True)
    assert all(rank.coordinator.ledger.entries[ONE].pinned for rank in run.ranks)
    run.settle()
    assert all(ONE in rank.committed(SHARED_TIER) for rank in run.ranks)


def test_what_is_pinned_in_memory_and_nowhere_else_stays_when_a_newer_one_is_durable() -> None:
    run = killed_with_all_in_memory([[0, 1], []], (0, 0), SHARED_TIER)
    trouble = run.ranks[0].troubles[SHARED_TIER]
    pinned = run.ranks[0].order(CommandKind.PIN, ONE)
    trouble.strike(failing(Operation.WRITE, StorageFullError, "*.safetensors"))
    run.settle()
    assert pinned == [{}]
    trouble.stop()
    for rank in run.ranks:
        rank.ordinal = 1
        rank.save(2)
    run.settle()
    assert run.committed(SHARED_TIER) == {CheckpointId(2, 2)}
    assert run.ranks[0].sealed() == {ONE, CheckpointId(2, 2)}
    assert all(ONE in rank.coordinator.ledger.entries for rank in run.ranks)


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
