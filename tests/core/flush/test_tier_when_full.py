"""Each tier's own ``when_full`` and ``max_wait``, where it is slower than the saves."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.core.flush.test_commits import failing
from tests.faults import Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER, Many
from tests.simulation.rank import Rank
from tests.simulation.throttled import Throttled
from tests.simulation.world import IMAGE, file_rules
from tierfall.core.flush.tasks import DeleteCopy, Task
from tierfall.core.types.errors import (
    CapacityError,
    FlushError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import WhenFull

COPY_S = 10.0
FULL = failing(Operation.CREATE, StorageFullError)


def behind(rule: WhenFull | None, *, images: int = 4, **options: Any) -> Throttled:
    """A store that takes a copy in ten seconds, below memory that waits for its tiers, if they say nothing else."""
    members = {"when_full": rule, **options.pop("members", {})}
    return Throttled(
        [file_rules("store", shared=True, **members)],
        bytes_per_s={"store": IMAGE / COPY_S},
        memory_images=images,
        **options,
    )


def save_every_second(world: Throttled, count: int) -> float:
    """Save so many times, a second after one another; return how many seconds saves have waited in all."""
    waited_s = 0.0
    for step in range(1, count + 1):
        asked_s = world.now_s
        assert world.save_soon(step) is not None
        waited_s += world.now_s - asked_s
        world.go_on(1.0)
    return waited_s


def small_nvme(rule: WhenFull | None) -> Throttled:
    """A fast disk for three images, and a store that is ten times slower than the saves."""
    return Throttled(
        [
            file_rules("nvme", capacity_bytes=int(3.5 * IMAGE)),
            file_rules("store", shared=True, when_full=rule),
        ],
        bytes_per_s={"nvme": IMAGE / 0.1, "store": IMAGE / COPY_S},
        memory_images=4,
        max_wait_s=5.0,
    )


def test_a_disk_that_is_full_of_what_a_slow_store_is_owed_goes_on_where_the_store_supersedes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        world = small_nvme(WhenFull.SUPERSEDE)
        assert save_every_second(world, 20) == 0.0
    assert world.steps_on("nvme")[-1] == 20, "the disk has the newest, whatever the store does"
    assert not world.coordinator.ledger.failing
    assert world.door.counts["given_up_copies"]["store"] > 5
    assert "nvme is full of copies that store is owed" in caplog.text
    assert world.coordinator.errors == []
    world.go_on(100.0)
    assert world.steps_on("store")[-1] == 20
    lost = next(h for h in world.handles.values() if h.exception() is not None)
    with pytest.raises(
        FlushError, match="given up: store: nvme is full of copies that store is owed"
    ):
        lost.wait("store", timeout=0)
    world.check("nvme")
    world.check("store")


def test_a_save_waits_no_longer_for_a_tier_than_its_own_max_wait() -> None:
    world = behind(None, images=2, members={"max_wait_s": 2.0}, max_wait_s=60.0)
    assert world.save_soon(1) is not None
    assert world.save_soon(2) is not None
    answer = world.ask_for_region(3)
    world.go_on(1.9)
    assert answer == []
    world.go_on(0.2)
    region, error = answer
    assert region is None
    with pytest.raises(CapacityError, match=r"none became free within max_wait \(2 s\)"):
        raise error


@pytest.mark.parametrize("node_of", [(0, 1), (0, 1, 1)])
@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["soon", "later"])
def test_one_copy_goes_where_the_disk_of_another_node_than_rank_0s_is_full(
    node_of: tuple[int, ...], seconds: float
) -> None:
    run = Many(node_of, [file_rules(NODE_TIER), file_rules(SHARED_TIER, shared=True)])
    for step in (1, 2):
        for rank in run.ranks:
            rank.save(step)
        run.settle()
    last = run.ranks[-1]
    last.troubles[NODE_TIER].strike(FULL)
    free_at_s: list[float] = []

    def free_some(rank: Rank, task: Task) -> None:
        if isinstance(task, DeleteCopy) and rank.node == last.node:
            free_at_s.append(run.now_s + seconds)

    def look() -> None:
        if free_at_s and run.now_s >= free_at_s[0]:
            last.troubles[NODE_TIER].stop()

    run.ran = free_some
    for rank in run.ranks:
        rank.save(3)
    run.settle(after_each=look)
    assert {id.step for id in run.committed(NODE_TIER)} == {2, 3}
    assert {id.step for id in run.committed(SHARED_TIER)} == {1, 2, 3}
    for rank in run.ranks:
        assert rank.coordinator.errors == []
        assert not rank.coordinator.busy()


def test_a_copy_that_no_room_can_be_made_for_on_another_node_is_given_up_by_all() -> None:
    run = Many((0, 1), [file_rules(NODE_TIER), file_rules(SHARED_TIER, shared=True)])
    run.ranks[1].troubles[NODE_TIER].strike(FULL)
    handles = [rank.save(1) for rank in run.ranks]
    run.settle()
    assert run.committed(NODE_TIER) == set()
    assert {id.step for id in run.committed(SHARED_TIER)} == {1}
    for handle in handles:
        with pytest.raises(FlushError, match=r"rank 1: .*nothing more may be deleted there"):
            handle.wait(NODE_TIER, timeout=0)


@pytest.mark.parametrize("node_of", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("tier", "operation"), [(SHARED_TIER, Operation.CREATE), (NODE_TIER, Operation.DELETE)]
)
def test_a_copy_waits_for_room_that_a_slower_copy_or_a_refused_deletion_will_make(
    node_of: tuple[int, ...], tier: str, operation: Operation
) -> None:
    """The newest step there may be deleted once the slower tier has it, too."""
    nvme = file_rules(NODE_TIER, capacity_bytes=IMAGE * 3 // 2)
    run = Many(node_of, [nvme, file_rules(SHARED_TIER, shared=True)])
    for rank in run.ranks:
        rank.troubles[tier].strike(failing(operation, UnreachableError))
    for step in (1, 2):
        handles = [rank.save(step) for rank in run.ranks]
        run.settle(limit_s=2.0)
    assert {id.step for id in run.committed(NODE_TIER)} == {1}
    for rank in run.ranks:
        rank.troubles[tier].stop()
    run.settle()
    assert {id.step for id in run.committed(NODE_TIER)} == {2}
    assert all(handle.done(NODE_TIER) for handle in handles)


def test_a_copy_that_nothing_will_make_room_for_is_given_up_by_all_ranks() -> None:
    """Else the parts of later copies, which some ranks have left, may hold the room for ever."""
    run = Many((0, 1), [file_rules(NODE_TIER, capacity_bytes=IMAGE * 3 // 2)])
    for step in (1, 2):
        handles = [rank.save(step) for rank in run.ranks]
        run.settle(limit_s=2.0)
    assert {id.step for id in run.committed(NODE_TIER)} == {1}
    for handle in handles:
        with pytest.raises(FlushError, match="All ranks give it up there"):
            handle.wait(NODE_TIER, timeout=0)
    assert not any(rank.coordinator.ledger.failing for rank in run.ranks)


def test_a_tier_fails_on_no_rank_once_the_copy_that_waited_for_room_is_given_up() -> None:
    tiers = [
        file_rules(NODE_TIER, capacity_bytes=IMAGE * 3 // 2),
        file_rules(SHARED_TIER, shared=True, capacity_bytes=IMAGE * 3),
    ]
    run = Many((0, 1), tiers)
    for step in (1, 2, 3):
        handles = [rank.save(step) for rank in run.ranks]
        run.settle()
    for handle in handles:
        with pytest.raises(FlushError, match="All ranks give it up there"):
            handle.wait(NODE_TIER, timeout=0)
    assert not any(rank.coordinator.ledger.failing for rank in run.ranks)
