"""Several snapshots in progress, and which of them a save supersedes when memory is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.world import World, file_rules
from tierfall.core.flush.tasks import (
    Outcome,
    Task,
)
from tierfall.core.types.errors import (
    AccessDeniedError,
    CapacityError,
)
from tierfall.core.types.values import CheckpointId, SaveOutcome, WhenFull
from tierfall.tiers.stored import StoredTier

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(2, 1)


def superseding(*rules: Any, images: int = 2, **options: Any) -> World:
    return World(
        rules or [file_rules("nvme")],
        memory_images=images,
        max_wait_s=5.0,
        when_full=WhenFull.SUPERSEDE,
        **options,
    )


def carry_out(world: World, fits: Callable[[Task], bool]) -> Task:
    """Carry out the first waiting task that fits."""
    task = next(task for task in world.tasks if fits(task))
    world.tasks.remove(task)
    world.coordinator.post(world.runner.run(task))
    world.step()
    return task


def until(world: World, kind: type, tier: str = "nvme") -> None:
    """Carry out a tier's tasks until one of this kind waits."""
    while not any(isinstance(t, kind) and t.tier == tier for t in world.tasks):
        carry_out(world, lambda task: task.tier == tier)


def give_way(world: World, step: int) -> Any:
    """Ask for a region, and get it at once."""
    region, error = world.ask_for_region(step)
    assert error is None, error
    return region


# Superseding -----------------------------------------------------------------------------------------


def test_an_image_whose_publishing_has_failed_gives_way_to_a_newer_one() -> None:
    """What the attempt has left on the tier is deleted: no commit record names it."""

    def refuse(*args: Any) -> None:
        raise AccessDeniedError("on purpose")

    world = superseding(images=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTier, "write_manifest", refuse)
        first = world.save(1)
        world.settle(limit_s=0.0)
    assert world.coordinator.ledger.unfinished
    second = world.save(2)
    give_way(world, 3)
    assert first.outcome is SaveOutcome.SUPERSEDED
    world.settle()
    assert second.done("nvme")
    assert world.steps_on("nvme") == [2]
    assert not world.coordinator.ledger.unfinished


def store_alone(world: World, until: Callable[[], bool]) -> None:
    """Carry out the tasks of tier store, and no others, until that holds."""
    while not until():
        carry_out(world, lambda task: task.tier == "store")


def test_what_is_saved_stays_saved_and_who_waits_for_another_tier_is_notified() -> None:
    """The last tier had it, and dropped it; it was still owed to another."""
    world = superseding(file_rules("nvme"), file_rules("store", retain_last=1), images=3)
    first, second = world.save(1), world.save(2)
    store_alone(world, lambda: world.steps_on("store") == [2] and second.done("store"))
    store_alone(world, lambda: not any(task.tier == "store" for task in world.tasks))
    assert first.outcome is SaveOutcome.SAVED
    for task in [task for task in world.tasks if task.tier == "nvme"]:
        world.tasks.remove(
            task
        )  # the copy to nvme fails before it is opened, and is tried again later
        world.coordinator.post(Outcome(task=task, error=AccessDeniedError("on purpose")))
    world.step()
    world.save(3)
    world.save(4)
    give_way(world, 5)
    assert FIRST not in world.coordinator.ledger.entries
    assert first.outcome is SaveOutcome.SAVED
    first.wait(timeout=0)
    first.captured(timeout=0)
    with pytest.raises(CapacityError, match="step 1 is superseded by step 5"):
        first.wait("nvme", timeout=0)
