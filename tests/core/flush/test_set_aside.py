"""A copy that can never be written, on a tier that accepts others, is set aside until the next start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.world import World, file_rules
from tierfall.core.types.backend import Backend
from tierfall.core.types.events import SetAside

OF_FIRST = "run/step-00000001-*"


def world_with(*plan: Fault, images: int = 5, **rules: Any) -> tuple[World, Faulty]:
    """Memory, and a tier that refuses by plan."""
    backends: list[Faulty] = []

    def wrap(name: str, inner: Backend) -> Backend:
        backends.append(Faulty(inner, seed=0, plan=plan))
        return backends[-1]

    world = World([file_rules("nvme", **rules)], wrap=wrap, memory_images=images, max_wait_s=30.0)
    return world, backends[0]


def set_aside_in(world: World) -> list[SetAside]:
    return [e for life in world.lives for e in life.events if isinstance(e, SetAside)]


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
