"""A tier that fails during a copy and recovers: the copy continues where it was, and reports one stall."""

from __future__ import annotations

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.world import World, file_rules
from tierfall.core.types.backend import Backend
from tierfall.core.types.events import SetAside
from tierfall.core.types.values import Codec


def world_with(*plan: Fault, codec: Codec = Codec.NONE, images: int = 3) -> World:
    """Memory, and a tier that fails by plan."""
    return World(
        [file_rules("nvme")],
        wrap=lambda name, inner: Faulty(inner, seed=0, plan=plan),
        codecs={"nvme": codec},
        memory_images=images,
    )


def failing(
    operation: Operation,
    *,
    keys: str = "*/rank-*",
    kind: FaultKind = FaultKind.FAIL_BEFORE,
    first: int = 1,
    times: int | None = 1,
) -> Fault:
    return Fault(kind=kind, operation=operation, keys=keys, first=first, times=times)


def test_a_source_that_does_not_answer_is_no_stall_of_the_target() -> None:
    """It ends the copy, which is begun anew: by then another source may serve it."""
    faults: dict[str, Faulty] = {}

    def wrap(name: str, inner: Backend) -> Backend:
        plan = {
            "nvme": failing(Operation.READ, keys="*.zst", times=2),
            "slow": failing(Operation.CREATE, times=None),
        }
        faults[name] = Faulty(inner, seed=0, plan=[plan[name]])
        return faults[name]

    world = World([file_rules("nvme"), file_rules("slow")], wrap=wrap, codecs={"nvme": Codec.ZSTD})
    world.save(1)
    world.settle(limit_s=10)
    world.crash()
    world.memory.regions.clear()
    faults["slow"].stop()
    world.trace.clear()
    world.start()
    world.settle()
    assert world.steps_on("slow") == [1]
    world.check("slow")
    assert sum(line.startswith("OpenShard") for line in world.trace) >= 2


@pytest.mark.parametrize("kind", [FaultKind.LOST_SYNC, FaultKind.UNSYNCED])
def test_a_copy_whose_fsync_fails_is_written_anew_while_others_come(kind: FaultKind) -> None:
    """The writer is dead, and the next one may well end: it was not this copy that could not be written."""
    tries, keys = 4, "run/step-00000001-*"
    world = world_with(failing(Operation.PUBLISH, keys=keys, kind=kind, times=tries), images=16)
    world.save(1)
    for step in range(2, 2 + tries):
        world.save(step)
        world.settle(limit_s=70)
    assert world.door.counts["flush_failures"] == {"nvme": tries}
    assert not any(isinstance(event, SetAside) for event in world.door.events)
    assert 1 in world.steps_on("nvme")
    world.check("nvme")
