"""A tier that fails during a copy and recovers: the copy continues where it was, and reports one stall."""

from __future__ import annotations

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tests.simulation.world import CHUNK, DATA_START, IMAGE, World, file_rules
from tierfall.core.types.backend import Backend, Writer
from tierfall.core.types.values import CheckpointId, Codec, SaveOutcome

FIRST = CheckpointId(1, 1)


def world_with(*plan: Fault, codec: Codec = Codec.NONE) -> tuple[World, Faulty]:
    backends: list[Faulty] = []

    def wrap(name: str, inner: Backend) -> Backend:
        backends.append(Faulty(inner, seed=0, plan=list(plan)))
        return backends[-1]

    world = World([file_rules("nvme")], wrap=wrap, codecs={"nvme": codec})
    return world, backends[0]


def failing(
    operation: Operation,
    *,
    keys: str = "*/rank-*",
    kind: FaultKind = FaultKind.FAIL_BEFORE,
    first: int = 1,
    times: int | None = 1,
) -> Fault:
    return Fault(kind=kind, operation=operation, keys=keys, first=first, times=times)


def opened(world: World) -> int:
    return sum(line.startswith("OpenShard") for line in world.trace)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_a_write_that_fails_is_sent_again_and_nothing_else(codec: Codec, kind: FaultKind) -> None:
    world, _ = world_with(failing(Operation.WRITE, kind=kind, first=2, times=3), codec=codec)
    handle = world.save(1)
    world.settle()
    assert handle.outcome is SaveOutcome.SAVED
    assert opened(world) == 1, "the image was begun again"
    assert world.steps_on("nvme") == [1]
    world.check("nvme")
    moved = world.coordinator.lanes["nvme"].edge_bytes["host"]
    assert moved == IMAGE
    assert world.door.counts["flush_failures"]["nvme"] >= 1


@pytest.mark.parametrize(
    ("codec", "operation", "keys"),
    [
        (Codec.NONE, Operation.PUBLISH, "*/rank-*"),
        (Codec.ZSTD, Operation.PUBLISH, "*/rank-*"),
        (Codec.ZSTD, Operation.CREATE, "*/rank-*.json"),
        (Codec.NONE, Operation.CREATE, "*/commit.json"),
        (Codec.NONE, Operation.SCAN, "*/attempts/*"),
    ],
)
def test_what_fails_at_the_end_is_finished_without_sending_the_image_again(
    codec: Codec, operation: Operation, keys: str
) -> None:
    first = 3 if operation is Operation.SCAN else 1  # looks before: at the start, as it begins
    world, _ = world_with(failing(operation, keys=keys, first=first, times=2), codec=codec)
    world.save(1)
    world.settle()
    if operation is not Operation.PUBLISH:  # a writer dies of a publish that failed
        assert opened(world) == 1, "the image was begun again"
    assert world.steps_on("nvme") == [1]
    world.check("nvme")


@pytest.mark.parametrize("run_bytes_min", [0, CHUNK, 2 * CHUNK, DATA_START + CHUNK, IMAGE, 1 << 30])
def test_runs_are_as_long_as_a_backend_needs_them(run_bytes_min: int) -> None:
    sizes: list[int] = []

    class Sized(MemoryBackend):
        def create(self, key: str, **options: object) -> Writer:  # type: ignore[override]
            writer = super().create(key, **options)  # type: ignore[arg-type]
            if key.endswith(".safetensors"):
                original = writer.write

                def write(offset: int, view: memoryview) -> None:
                    sizes.append(len(view))
                    original(offset, view)

                writer.write = write  # type: ignore[method-assign]
            return writer

    disk = Sized("nvme")
    world = World([file_rules("nvme")], wrap=lambda name, inner: disk, run_bytes_min=run_bytes_min)
    world.disks["nvme"] = disk
    world.save(1)
    world.settle()
    world.check("nvme")
    assert sum(sizes) == IMAGE
    assert sum(size < run_bytes_min for size in sizes) <= 1, "only the last may be shorter"
    if run_bytes_min <= CHUNK:
        assert len(sizes) == 4


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
