"""A tier that accepts nothing: all waiters are answered, no loop spins, and it is retried."""

from __future__ import annotations

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.format.records import Mark
from tierfall.core.scheduler.ledger.tasks import Command, CommandKind, OpenShard
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import CapacityError, FlushError, StorageFullError, UnreachableError
from tierfall.core.types.values import CheckpointId, SaveOutcome


def broken_world(**rules: object) -> tuple[World, list[Faulty]]:
    backends: list[Faulty] = []

    def wrap(name: str, inner: Backend) -> Backend:
        fault = Fault(
            kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, keys="run/step-*", times=None
        )
        backends.append(Faulty(inner, seed=0, plan=[fault]))
        return backends[-1]

    return World([file_rules("nvme", **rules)], wrap=wrap, memory_images=4), backends  # type: ignore[arg-type]


def test_every_save_that_waits_for_a_failing_tier_is_notified_and_later_ones_at_once() -> None:
    world, backends = broken_world()
    first, second = world.save(1), world.save(2)
    world.settle()
    third = world.save(3)
    for handle in (first, second, third):
        assert handle.outcome is SaveOutcome.FAILED
        with pytest.raises(FlushError, match="nvme failed and is still being tried"):
            handle.wait(timeout=0)
    assert len(world.coordinator.errors) == 1, "one outage is one error"
    backends[0].stop()
    world.settle()
    assert {h.outcome for h in (first, second, third)} == {SaveOutcome.SAVED}
    assert world.steps_on("nvme") == [1, 2, 3]
    fourth = world.save(4)
    assert fourth.outcome is SaveOutcome.PENDING


def test_everybody_who_waits_for_a_full_tier_is_notified() -> None:
    world = World([file_rules("nvme", capacity_bytes=int(1.5 * IMAGE))], memory_images=4)
    world.save(1)
    world.settle()
    assert world.order(CommandKind.PIN, CheckpointId(1, 1)) == {}
    handles = [world.save(2), world.save(3)]
    world.settle(limit_s=10)
    for handle in handles:
        with pytest.raises(CapacityError, match="tried again when room is made, and every 60 s"):
            handle.wait(timeout=0)


@pytest.mark.parametrize("how", ["unpin", "tombstone"])
def test_a_full_tier_learns_of_room_that_was_made_from_outside(how: str) -> None:
    world = World([file_rules("nvme", capacity_bytes=int(2.5 * IMAGE))], memory_images=4)
    for step in (1, 2):
        world.save(step)
        world.settle()
        assert world.order(CommandKind.PIN, CheckpointId(step, 1)) == {}
    world.save(3)
    world.settle(limit_s=10)
    assert world.steps_on("nvme") == [1, 2]
    world.stores["nvme"].remove_mark(CheckpointId(1, 1), "pin")
    world.coordinator.ledger.entries[CheckpointId(1, 1)].set_mark("host", "pin", there=False)
    if how == "tombstone":
        world.stores["nvme"].add_mark(
            Mark(name="tombstone", checkpoint=CheckpointId(1, 1), wall_time_s=0.0)
        )
    world.settle(limit_s=200)
    assert world.steps_on("nvme") == [2, 3]


def test_a_full_disk_beside_a_deletion_that_waits_is_not_tried_over_and_over() -> None:
    full = False

    class Full:
        def __init__(self, inner: Backend) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def create(self, key: str, **words: object) -> object:
            if full and key.endswith(".safetensors"):
                raise StorageFullError("no space")
            return self._inner.create(key, **words)  # type: ignore[arg-type]

    def wrap(name: str, inner: Backend) -> Backend:
        return Full(inner) if name == "nvme" else inner  # type: ignore[return-value]

    world = World([file_rules("nvme"), file_rules("store")], wrap=wrap, memory_images=4)
    for step in (1, 2):
        world.save(step)
        world.settle()
    world.coordinator.post(
        Command(
            kind=CommandKind.DELETE,
            id=CheckpointId(1, 1),
            wall_time_s=0.0,
            on_answer=lambda failed: None,
        )
    )
    world.step()  # its tombstones are on their way, and the far one takes long
    full = True
    world.save(3)
    opened = 0
    for _ in range(300):
        task = next((t for t in world.tasks if t.tier == "nvme"), None)
        if task is None:
            break
        opened += isinstance(task, OpenShard)
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    assert opened <= 3
    full = False
    world.settle()
    assert world.steps_on("nvme") == [3]
    assert world.steps_on("store") == [2, 3]


def test_whoever_waits_for_room_that_a_deletion_cannot_make_yet_is_notified() -> None:
    """Another tier takes no marks, so what is deleted stays on this one meanwhile, and the rest is pinned."""
    world = World([file_rules("disk", capacity_bytes=int(2.5 * IMAGE)), file_rules("slow")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    assert world.order(CommandKind.PIN, CheckpointId(1, 1)) == {}
    marking = world.stores["slow"].add_mark
    world.stores["slow"].add_mark = _refuse  # type: ignore[method-assign]
    failed = world.order(CommandKind.DELETE, CheckpointId(2, 1))
    assert list(failed) == ["slow"]
    third = world.save(3)
    world.settle(limit_s=20)
    assert isinstance(third.exception(), CapacityError)
    world.stores["slow"].add_mark = marking  # type: ignore[method-assign]
    world.settle()
    assert third.done("disk")
    assert 2 not in world.steps_on("disk") + world.steps_on("slow")


def _refuse(mark: Mark) -> None:
    raise UnreachableError("not now")


def test_a_tier_whose_marks_hang_keeps_no_copy_from_another_tier() -> None:
    world = World([file_rules("disk"), file_rules("slow")], memory_images=4)
    world.save(1)
    while world.steps_on("disk") != [1]:
        task = next(t for t in world.tasks if t.tier == "disk")
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    for kind in (CommandKind.PIN, CommandKind.UNPIN):
        world.coordinator.post(
            Command(
                kind=kind, id=CheckpointId(1, 1), wall_time_s=0.0, on_answer=lambda failed: None
            )
        )
    world.step()
    for step in (2, 3):
        world.save(step)
    while any(t.tier == "slow" for t in world.tasks):  # those of disk hang
        task = next(t for t in world.tasks if t.tier == "slow")
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    assert world.steps_on("slow") == [1, 2, 3]
