"""Full host memory: no image is given up in vain, and what a skipped save does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.core.scheduler.test_superseding import (
    FIRST,
    carry_out,
    give_way,
    keeps_waiting,
    rest,
    superseding,
    until,
)
from tests.simulation.world import IMAGE, FakeMemory, World, file_rules
from tierfall.core.scheduler.ledger.tasks import (
    AbortShard,
    AdmissionRequest,
    Command,
    CommandKind,
    CopyRun,
    Outcome,
)
from tierfall.core.types.errors import CapacityError, FlushError, UnreachableError
from tierfall.core.types.values import CheckpointId, SaveOutcome, Shard, WhenFull
from tierfall.tiers.arena.arena import Arena, extent_bytes

# Whether it would make room --------------------------------------------------------------------------

RECORDS = 8192
EXTENT = extent_bytes(image_bytes=IMAGE, records_bytes=RECORDS)


@pytest.mark.parametrize(
    ("pinned", "image_bytes", "records_bytes", "given_up"),
    [
        (2, 2 * EXTENT - RECORDS, RECORDS, []),  # 1 and 3 are enough, but do not lie side by side
        (3, 2 * EXTENT - RECORDS, RECORDS, [1, 2]),
        (2, IMAGE, RECORDS, [1]),
        (2, IMAGE, RECORDS + 4096, []),  # its records need a page more than there would be
    ],
)
def test_nothing_is_given_up_where_that_would_not_make_room(
    tmp_path: Path, pinned: int, image_bytes: int, records_bytes: int, given_up: list[int]
) -> None:
    arena = Arena.create(
        tmp_path / "slot-0.arena", run="run", shard=Shard(0, 1), slot=0, capacity_bytes=4 * EXTENT
    )
    world = rest(superseding())
    world.coordinator._admissions._host = arena
    for step in (1, 2, 3, 4):
        region, _ = world.ask_for_region(step, records_bytes=RECORDS)
        world.seal(world.begin(step, region))
    id = CheckpointId(pinned, 1)
    pin = Command(kind=CommandKind.PIN, id=id, wall_time_s=0.0, on_answer=lambda failed: None)
    world.coordinator.post(pin)
    answer = world.ask_for_region(5, image_bytes=image_bytes, records_bytes=records_bytes)
    lost = [id.step for id, h in world.handles.items() if h.outcome is SaveOutcome.SUPERSEDED]
    assert lost == given_up
    assert bool(answer and answer[0]) == bool(given_up)
    arena.close(keep=False)


# A save that nobody waits for any more ---------------------------------------------------------------


def test_a_save_that_was_interrupted_supersedes_nothing() -> None:
    world = rest(superseding())
    first, _ = world.save(1), world.save(2)
    world.coordinator.deleter.set_paused(True)
    answer: list[Any] = []
    request = AdmissionRequest(
        id=CheckpointId(3, 1),
        image_bytes=IMAGE,
        records_bytes=0,
        deadline_s=world.now_s + 5.0,
        on_answer=lambda *messages: answer.extend(messages),
    )
    world.coordinator.post(request)
    world.step()
    assert answer == []
    request.cancelled.set()
    world.coordinator.deleter.set_paused(False)
    world.step()
    assert (first.outcome, answer) == (SaveOutcome.PENDING, [])
    world.settle()
    assert world.steps_on("nvme") == [1, 2]
    assert not world.coordinator.busy()


def test_what_a_save_gives_up_is_aborted_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else need happen afterwards: whoever waits for idleness must not wait for ever, nor be told too early."""
    world = World([file_rules("nvme")], memory_images=2)
    world.save(1)
    until(world, CopyRun)
    while any(isinstance(task, CopyRun) for task in world.tasks):
        world.coordinator.post(
            Outcome(task=world.tasks.pop(0), error=UnreachableError("on purpose"))
        )
        world.step()
    coordinator = world.coordinator
    assert not world.tasks
    passes: list[float] = []
    admit = coordinator._admissions.try_admit

    def give_up_in_the_second(now_s: float, refusal: BaseException | None) -> None:
        admit(now_s, refusal)
        passes.append(now_s)
        if len(passes) == 2:
            entry = coordinator.ledger.entries[FIRST]
            coordinator._flusher.give_up_copy(entry, "nvme", FlushError("on purpose"))

    monkeypatch.setattr(coordinator._admissions, "try_admit", give_up_in_the_second)
    world.step()
    assert [type(task) for task in world.tasks] == [AbortShard]
    assert coordinator.busy()
    world.settle()
    assert not coordinator.busy()
    assert world.disks["nvme"].discard_unfinished("") == 0


# Skipping --------------------------------------------------------------------------------------------


def test_a_save_is_skipped_at_once_and_each_cause_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World([file_rules("nvme")], memory_images=1, when_full=WhenFull.SKIP)
    world.save(1)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            region, error = world.ask_for_region(step)
            assert region is None
            assert isinstance(error, CapacityError)
            assert f"step {step}" in str(error)
            assert "when_full: skip" in str(error)
            assert "owed to nvme" in str(error)
    assert len(caplog.records) == 1
    world.settle()
    assert world.steps_on("nvme") == [1]
    assert give_way(world, 4) is not None


def test_where_saves_are_skipped_a_copy_is_read_from_storage_so_that_memory_is_free() -> None:
    world = World(
        [file_rules("nvme"), file_rules("store")], memory_images=2, when_full=WhenFull.SKIP
    )
    world.save(1)
    world.save(2)
    assert world.ask_for_region(3)[0] is None
    until(world, CopyRun, "store")
    while world.steps_on("nvme") != [1]:
        carry_out(world, lambda task: task.tier == "nvme")
    while world.coordinator.ledger.entries[FIRST].leases.get("host"):
        carry_out(world, lambda task: task.tier == "store")
    left = {t.source.tier for t in world.tasks if isinstance(t, CopyRun) and t.id == FIRST}
    assert left == {"nvme"}, "the rest of it"
    assert give_way(world, 3) is not None
    world.settle()
    assert world.steps_on("store") == [1, 2]
    world.check("store")


def test_a_skipped_save_that_lacks_room_for_its_records_alone_makes_copies_spare_memory() -> None:
    """What free bytes say is not asked: the image alone would have room."""
    world = World(
        [file_rules("nvme"), file_rules("store")], memory_images=2, when_full=WhenFull.SKIP
    )
    world.memory.capacity_bytes += 100
    region, _ = world.ask_for_region(1, records_bytes=100)
    world.seal(world.begin(1, region))
    world.step()
    until(world, CopyRun, "store")
    while world.steps_on("nvme") != [1]:
        carry_out(world, lambda task: task.tier == "nvme")
    assert world.memory.free_bytes == IMAGE
    assert world.ask_for_region(2, records_bytes=100)[0] is None
    while world.coordinator.ledger.entries[FIRST].leases.get("host"):
        carry_out(world, lambda task: task.tier == "store")
    assert {t.source.tier for t in world.tasks if isinstance(t, CopyRun)} == {"nvme"}, "the rest"
    region, _ = world.ask_for_region(2, records_bytes=100)
    assert region is not None
    world.seal(world.begin(2, region))
    world.step()
    assert not any(lane.spare_memory for lane in world.coordinator.lanes.values())


def test_copies_go_on_without_asking_memory_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be busy for a while, as when it grows."""
    world = World([file_rules("nvme")], when_full=WhenFull.SKIP)
    world.save(1)

    def busy(memory: FakeMemory) -> int:
        raise AssertionError("memory is busy")

    monkeypatch.setattr(FakeMemory, "free_bytes", property(busy))
    world.settle()
    assert world.steps_on("nvme") == [1]


def test_waiting_says_each_save_that_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    world = World([file_rules("nvme")], memory_images=1, max_wait_s=5.0)
    world.save(1)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            keeps_waiting(world, step)
    assert len(caplog.records) == 2
