"""A tier that accepts nothing: all waiters are answered, no loop spins, and it is retried."""

from __future__ import annotations

from tests.simulation.world import World, file_rules
from tierfall.core.flush.tasks import Command, CommandKind, OpenShard
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import StorageFullError
from tierfall.core.types.values import CheckpointId


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
            on_answer=lambda failed: None,
        )
    )
    world.step()  # its entries are on their way, and the far one takes long
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


def test_a_tier_whose_list_hangs_keeps_no_copy_from_another_tier() -> None:
    world = World([file_rules("disk"), file_rules("slow")], memory_images=4)
    world.save(1)
    while world.steps_on("disk") != [1]:
        task = next(t for t in world.tasks if t.tier == "disk")
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    for kind in (CommandKind.PIN, CommandKind.UNPIN):
        world.coordinator.post(
            Command(kind=kind, id=CheckpointId(1, 1), on_answer=lambda failed: None)
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
