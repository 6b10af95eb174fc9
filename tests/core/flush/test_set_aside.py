"""A copy that can never be written, on a tier that accepts others, is set aside until the next start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.flush.test_commits import failing, talk
from tests.core.flush.test_commits import world as ranks
from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.many import NODE_TIER, SHARED_TIER
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.flush.flusher import ARRIVALS_BEFORE_SET_ASIDE
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    FlushError,
    UnreachableError,
)
from tierfall.core.types.events import SetAside
from tierfall.core.types.values import CheckpointId, SaveOutcome

FIRST = CheckpointId(1, 1)
OF_FIRST = "run/step-00000001-*"


def refusing(
    keys: str, error: type[BackendError] = AccessDeniedError, times: int | None = None
) -> Fault:
    """Whatever is made below these keys is refused."""
    kind = FaultKind.FAIL_BEFORE
    return Fault(kind=kind, operation=Operation.CREATE, keys=keys, times=times, error=error)


def world_with(*plan: Fault, images: int = 5, **rules: Any) -> tuple[World, Faulty]:
    """Memory, and a tier that refuses by plan."""
    backends: list[Faulty] = []

    def wrap(name: str, inner: Backend) -> Backend:
        backends.append(Faulty(inner, seed=0, plan=plan))
        return backends[-1]

    world = World([file_rules("nvme", **rules)], wrap=wrap, memory_images=images, max_wait_s=30.0)
    return world, backends[0]


def start_again(world: World, newest: int) -> None:
    """The process dies; another one goes on from the newest step."""
    world.started_from = max(id for id in world.handles if id.step == newest)
    world.crash()
    world.start()


def set_aside_in(world: World) -> list[SetAside]:
    return [e for life in world.lives for e in life.events if isinstance(e, SetAside)]


def owed_in(world: World) -> list[tuple[int, str]]:
    return [(id.step, tier) for id, tier in world.coordinator.owed_copies()]


def test_an_uploaded_copy_is_committed_although_its_image_has_left_memory() -> None:
    """The tier refuses its commit record for long, and a save needs the memory."""
    world, faulty = world_with(refusing("*/commit.json", UnreachableError), images=2)
    first = world.save(1)
    world.settle(limit_s=100)
    assert world.coordinator.ledger.failing.keys() == {"nvme"}
    for step in (2, 3):
        world.save(step)
    assert len(world.memory.regions) == 2
    faulty.stop()
    world.settle(limit_s=200)
    assert world.steps_on("nvme") == [1, 2, 3]
    assert first.outcome is SaveOutcome.SAVED


def test_one_that_waits_alone_is_tried_until_another_one_tells_whose_fault_it_is() -> None:
    world, _ = world_with(refusing(OF_FIRST))
    first = world.save(1)
    world.settle(limit_s=500)
    assert owed_in(world) == [(1, "nvme")], "it may be the tier that fails"
    assert isinstance(first.exception(), FlushError)
    assert set_aside_in(world) == []
    second = world.save(2)
    assert second.exception() is None, "nobody knows yet"
    world.settle(limit_s=0)
    assert second.outcome is SaveOutcome.SAVED
    world.settle(limit_s=100)
    assert [event.id for event in set_aside_in(world)] == [FIRST]


def test_one_that_does_not_answer_while_others_come_is_set_aside_later() -> None:
    """That may pass: so many others must have come between its tries."""
    world, _ = world_with(refusing(OF_FIRST, UnreachableError), images=16)
    world.save(1)
    for step in range(2, ARRIVALS_BEFORE_SET_ASIDE + 1):
        world.save(step)
        world.settle(limit_s=70)
        assert step in world.steps_on("nvme")
    assert set_aside_in(world) == []
    assert owed_in(world) == [(1, "nvme")]
    for step in range(20, 24):
        world.save(step)
        world.settle(limit_s=70)
    assert [event.id for event in set_aside_in(world)] == [FIRST]
    assert world.steps_on("nvme")[-1] == 23


@pytest.mark.parametrize("kind", [FaultKind.LOST_SYNC, FaultKind.UNSYNCED])
def test_one_whose_fsync_fails_is_written_anew_while_others_come(kind: FaultKind) -> None:
    """The writer is dead, and the next one may well end: it was not this copy that could not be written."""
    tries = 4
    world, _ = world_with(
        Fault(kind=kind, operation=Operation.PUBLISH, keys=OF_FIRST, times=tries), images=16
    )
    world.save(1)
    for step in range(2, 2 + tries):
        world.save(step)
        world.settle(limit_s=70)
    assert world.door.counts["flush_failures"] == {"nvme": tries}
    assert set_aside_in(world) == []
    assert 1 in world.steps_on("nvme")
    world.check("nvme")


def test_the_next_start_tries_it_again_and_the_one_after_it_too() -> None:
    world, faulty = world_with(refusing(OF_FIRST))
    for step in (1, 2, 3):
        world.save(step)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [2, 3]
    for _ in range(2):
        start_again(world, 3)
        assert owed_in(world) == [(1, "nvme")], "newer ones are there, and say that it is owed"
    world.save(4)
    world.settle(limit_s=20)
    assert len(set_aside_in(world)) == 2
    faulty.stop()
    start_again(world, 4)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    world.check("nvme")


def test_what_was_mended_and_dropped_by_retention_is_not_sent_again() -> None:
    world, faulty = world_with(refusing(OF_FIRST), retain_last=2)
    for step in (1, 2):
        world.save(step)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [2]
    faulty.stop()
    start_again(world, 2)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [1, 2]
    world.save(3)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [2, 3]
    start_again(world, 3)
    assert owed_in(world) == []


def test_an_old_one_is_not_brought_in_place_of_newer_ones() -> None:
    world, faulty = world_with(refusing(OF_FIRST), capacity_bytes=int(2.5 * IMAGE))
    for step in (1, 2, 3):
        world.save(step)
    world.settle(limit_s=20)
    faulty.stop()
    start_again(world, 3)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == [2, 3]
    assert owed_in(world) == []


# Several ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tier", [NODE_TIER, SHARED_TIER])
def test_all_ranks_set_aside_what_one_cannot_write(tier: str, rank: int) -> None:
    run = ranks(tiers=tier)
    run.ranks[rank].troubles[tier].strike(
        failing(Operation.CREATE, AccessDeniedError, keys=OF_FIRST)
    )
    for step in (1, 2, 3):
        for one in run.ranks:
            one.save(step)
        talk(run)
    run.settle(limit_s=60)
    for one in run.ranks:
        with pytest.raises(FlushError, match=f"rank {rank}: .* is set aside"):
            one.handles[FIRST].wait(tier, timeout=0)
        assert one.door.counts["set_aside_copies"][tier] == 1
        for step in (2, 3):
            assert one.handles[CheckpointId(step, 1)].done(tier)
        assert one.coordinator.ledger.failing == {}
        assert not one.coordinator.busy()
    assert not any(
        key.startswith("run/step-00000001")
        for disk in run.disks(tier).values()
        for key in disk._objects
    ), "what others had brought of it is taken back"
