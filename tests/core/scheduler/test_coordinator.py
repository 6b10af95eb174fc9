"""The scheduler's promises, on a virtual clock and without threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.world import IMAGE, World, file_rules
from tierfall.core.scheduler.ledger.tasks import CommandKind, CopyRun, FinishCopy, LedgerQuery
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    CapacityError,
    CaptureError,
    FlushError,
    StepError,
    StorageFullError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, CopyState, SaveOutcome


def test_a_save_arrives_on_every_tier_with_the_same_bytes() -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    handle = world.save(100)
    world.settle()
    assert handle.outcome is SaveOutcome.SAVED
    assert handle.done("nvme")
    for tier in ("nvme", "store"):
        assert world.steps_on(tier) == [100]
        world.check(tier)


def test_flush_every_counts_ordinals_not_steps() -> None:
    world = World([file_rules("nvme"), file_rules("store", flush_every=2)])
    for step in (7, 9, 100, 101):
        world.save(step)
        world.settle()
    assert world.steps_on("nvme") == [7, 9, 100, 101]
    assert world.steps_on("store") == [9, 101]


def test_flush_every_counts_over_restarts() -> None:
    world = World([file_rules("nvme", flush_every=2)])
    world.save(1)
    world.settle()
    world.crash()
    world.start()
    world.save(2)
    world.settle()
    assert world.steps_on("nvme") == [2]


def test_chunks_follow_the_watermark_before_the_capture_ends() -> None:
    world = World([file_rules("nvme")])
    region, _ = world.ask_for_region(1)
    snapshot = world.begin(1, region)
    world.advance(snapshot, 2)
    world.settle()
    lane = world.coordinator.lanes["nvme"]
    assert lane.active is not None
    assert lane.active.done == 2  # exactly what is final, no more
    assert world.steps_on("nvme") == []
    world.seal(snapshot)
    world.settle()
    assert world.steps_on("nvme") == [1]
    world.check("nvme")


def test_a_query_that_follows_a_seal_sees_the_image_as_sealed() -> None:
    """A program that waits for a capture and then asks what survives gets that checkpoint."""
    world = World([file_rules("nvme")])
    region, _ = world.ask_for_region(1)
    world.seal(world.begin(1, region))
    ledger = world.coordinator.ledger
    seen: list[object] = []
    world.coordinator.post(
        LedgerQuery(
            function=lambda: ledger.entries[CheckpointId(1, 1)].state(ledger.host),
            on_answer=lambda state, error: seen.append(error or state),
        )
    )
    world.step()
    assert seen == [CopyState.SEALED]


def test_nothing_is_committed_before_every_chunk_outcome_is_in() -> None:
    world = World([file_rules("nvme")])
    world.save(1)
    while not any(isinstance(task, FinishCopy) for task in world.tasks):
        assert world.steps_on("nvme") == []
        copies = [t for t in world.tasks if isinstance(t, CopyRun)]
        assert not (copies and any(isinstance(t, FinishCopy) for t in world.tasks))
        assert world.run_one()
    lane = world.coordinator.lanes["nvme"]
    assert lane.active is not None
    assert lane.active.done == 4


def test_a_failed_capture_leaves_nothing_on_any_tier() -> None:
    world = World([file_rules("nvme")])
    region, _ = world.ask_for_region(1)
    snapshot = world.begin(1, region)
    world.advance(snapshot, 2)
    world.settle()
    world.fail_capture(snapshot, CaptureError("changed"))
    world.settle()
    assert snapshot.handle.outcome is SaveOutcome.FAILED
    assert world.memory.regions == []
    assert world.stores["nvme"].files(snapshot.id) == ()
    assert world.disks["nvme"].discard_unfinished("") == 0
    world.save(2)
    world.settle()
    assert world.steps_on("nvme") == [2]


def test_a_full_host_waits_for_the_flush_and_then_goes_on() -> None:
    world = World([file_rules("nvme")], memory_images=1)
    world.save(1)
    answer = world.ask_for_region(2)
    assert answer == []  # step 1 is still owed
    world.settle(limit_s=0)
    region, error = answer
    assert error is None
    assert region is not None
    assert world.steps_on("nvme") == [1]


def test_a_host_that_stays_full_skips_the_save_at_max_wait() -> None:
    world = World([file_rules("nvme")], memory_images=1, max_wait_s=5.0)
    world.save(1)
    answer = world.ask_for_region(2)
    world.now_s = 4.9
    world.step()
    assert answer == []
    world.now_s = 5.0
    world.step()
    region, error = answer
    assert region is None
    assert isinstance(error, CapacityError)
    assert "max_wait (5 s)" in str(error)
    assert "nvme" in str(error)


def test_the_newest_sealed_image_stays_in_memory() -> None:
    world = World([file_rules("nvme")], memory_images=2)
    for step in (1, 2, 3):
        world.save(step)
        world.settle()
    held = {e.id.step for e in world.coordinator.ledger.entries.values() if e.region}
    assert held == {2, 3}


def test_retention_drops_only_after_the_successor_is_committed() -> None:
    world = World([file_rules("nvme", retain_last=1)])
    world.save(1)
    world.settle()
    world.save(2)
    while world.steps_on("nvme") != [1, 2]:
        assert 1 in world.steps_on("nvme")
        assert world.run_one()
    world.settle()
    assert world.steps_on("nvme") == [2]


def test_a_pin_that_came_from_elsewhere_is_seen_before_anything_is_dropped() -> None:
    """The command line leaves a mark beside a living trainer, which must not drop what it believed to be unpinned."""
    from tierfall.core.format.records import Mark

    world = World([file_rules("nvme", retain_last=1)])
    world.save(1)
    world.settle()
    world.stores["nvme"].add_mark(Mark(name="pin", checkpoint=CheckpointId(1, 1), wall_time_s=0.0))
    world.save(2)
    world.settle()
    assert world.steps_on("nvme") == [1, 2]


def test_a_tombstone_that_came_from_elsewhere_is_executed_after_the_next_commit() -> None:
    from tierfall.core.format.records import Mark

    world = World([file_rules("nvme")])
    world.save(1)
    world.settle()
    world.stores["nvme"].add_mark(
        Mark(name="tombstone", checkpoint=CheckpointId(1, 1), wall_time_s=0.0)
    )
    world.save(2)
    world.settle()
    assert world.steps_on("nvme") == [2]


def test_a_pin_travels_with_the_copy_and_survives_a_restart() -> None:
    world = World([file_rules("nvme", retain_last=1), file_rules("store", retain_last=1)])
    world.save(1)
    assert world.order(CommandKind.PIN, CheckpointId(1, 1)) == {}
    world.crash()
    world.start()
    world.ordinal = 1
    for step in (2, 3):
        world.save(step)
        world.settle()
    assert world.steps_on("nvme") == [1, 3]
    assert world.steps_on("store") == [1, 3]
    assert world.order(CommandKind.UNPIN, CheckpointId(1, 1)) == {}
    world.save(4)
    world.settle()
    assert world.steps_on("nvme") == [4]


def test_delete_takes_every_copy_and_refuses_a_pinned_one() -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    world.order(CommandKind.PIN, CheckpointId(1, 1))
    failed = world.order(CommandKind.DELETE, CheckpointId(1, 1))
    assert isinstance(failed["tierfall"], StepError)
    assert "unpin" in str(failed["tierfall"])
    assert world.order(CommandKind.DELETE, CheckpointId(2, 1)) == {}
    for tier in ("nvme", "store"):
        assert world.steps_on(tier) == [1]
        assert world.stores[tier].read_latest() == CheckpointId(1, 1)
    assert CheckpointId(2, 1) not in world.coordinator.ledger.entries


def test_an_order_about_an_unknown_step_is_answered() -> None:
    world = World([file_rules("nvme")])
    failed = world.order(CommandKind.PIN, CheckpointId(5, 1))
    assert "5@1" in str(failed["tierfall"])


# Failures --------------------------------------------------------------------------------------------


class Switch:
    """A backend that fails every create while it is on, with the error that it is given."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def create(self, *args: object, **options: object) -> object:
        if self.error is not None:
            raise self.error
        return self._inner.create(*args, **options)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def world_with_switch(*rules: object, **options: object) -> tuple[World, Switch]:
    switches: dict[str, Switch] = {}

    def wrap(name: str, inner: object) -> object:
        switches[name] = Switch(inner)
        return switches[name]

    world = World(rules or [file_rules("nvme")], wrap=wrap, **options)  # type: ignore[arg-type]
    return world, switches["nvme"]


def test_a_tier_that_fails_and_comes_back_gets_everything_it_was_owed() -> None:
    world, switch = world_with_switch(max_wait_s=30.0)
    switch.error = UnreachableError("down")
    handle = world.save(1)
    world.settle(limit_s=20)
    assert world.steps_on("nvme") == []
    assert handle.exception() is None  # still within max_wait
    world.settle(limit_s=60)
    assert isinstance(handle.exception(), FlushError)
    assert handle.outcome is SaveOutcome.FAILED
    switch.error = None
    world.settle(limit_s=120)
    assert world.steps_on("nvme") == [1]
    assert handle.outcome is SaveOutcome.SAVED
    assert handle.exception() is None


def test_a_failing_tier_never_keeps_a_save_waiting_once_it_is_known_to_fail() -> None:
    world, switch = world_with_switch(memory_images=2, max_wait_s=10.0)
    switch.error = UnreachableError("down")
    first = world.save(1)
    world.settle(limit_s=30)
    for step in (2, 3, 4):
        world.save(step)  # asserts that it was admitted at once
    assert world.coordinator.counters.given_up_copies >= 1
    with pytest.raises(FlushError, match="memory is full"):
        first.wait("nvme")


def test_a_full_disk_drops_the_oldest_and_the_copy_lands() -> None:
    world, switch = world_with_switch()
    for step in (1, 2):
        world.save(step)
        world.settle()
    switch.error = StorageFullError("no space")
    handle = world.save(3)
    while 1 in world.steps_on("nvme"):
        assert world.run_one()
    switch.error = None
    world.settle(limit_s=0)
    assert world.steps_on("nvme") == [2, 3]
    assert handle.outcome is SaveOutcome.SAVED


def test_a_disk_that_others_filled_is_reported_and_tried_again() -> None:
    world, switch = world_with_switch()
    world.save(1)
    world.settle()
    switch.error = StorageFullError("no space")
    handle = world.save(2)
    world.settle(limit_s=0)
    assert isinstance(handle.exception(), CapacityError)
    assert world.steps_on("nvme") == [1]  # the newest durable one is never the price
    switch.error = None
    world.settle(limit_s=100)
    assert 2 in world.steps_on("nvme")
    assert handle.outcome is SaveOutcome.SAVED


def test_a_capacity_is_kept_by_dropping_the_oldest() -> None:
    world = World([file_rules("nvme", capacity_bytes=int(2.5 * IMAGE))])
    for step in (1, 2, 3):
        world.save(step)
        world.settle()
    assert world.steps_on("nvme") == [2, 3]


def test_a_capacity_full_of_pins_is_reported_with_both_numbers_and_loses_nothing() -> None:
    world = World([file_rules("nvme", capacity_bytes=int(2.5 * IMAGE))])
    for step in (1, 2):
        world.save(step)
        world.settle()
        world.order(CommandKind.PIN, CheckpointId(step, 1))
    handle = world.save(3)
    world.settle()
    error = handle.exception()
    assert isinstance(error, CapacityError)
    assert "room for" in str(error)
    assert world.steps_on("nvme") == [1, 2]
    world.order(CommandKind.UNPIN, CheckpointId(1, 1))
    world.settle()
    assert world.steps_on("nvme") == [2, 3]


def test_a_copy_whose_source_is_damaged_comes_from_the_next_one() -> None:
    world = World([file_rules("nvme"), file_rules("store", flush_every=1)], memory_images=1)
    world.save(1)
    while world.steps_on("nvme") != [1]:
        # the store's lane must not have finished: hold its tasks back
        own = [t for t in world.tasks if t.tier == "nvme"]
        task = own[0] if own else world.tasks[0]
        world.tasks.remove(task)
        world.coordinator.post(world.runner.run(task))
        world.step()
    lane = world.coordinator.lanes["store"]
    assert lane.active is not None
    assert lane.active.done < 4
    region = next(iter(world.memory.regions))
    region.image[DAMAGE] ^= 1
    entry = world.coordinator.ledger.entries[CheckpointId(1, 1)]
    entry.adopted = True  # memory of an earlier start is checked before it is believed
    world.settle()
    assert world.steps_on("store") == [1]
    world.check("store")


DAMAGE = IMAGE - 1


def test_a_copy_with_no_good_source_is_given_up_and_reported() -> None:
    world = World([file_rules("nvme")])
    handle = world.save(1)
    world.crash()
    world.start()
    world.memory.regions[0].image[DAMAGE] ^= 1
    world.settle()
    assert world.steps_on("nvme") == []
    assert world.coordinator.counters.given_up_copies == 1
    assert "no tier has a good copy" in str(world.coordinator.errors[-1])
    assert not handle.done("nvme")


# Restarts --------------------------------------------------------------------------------------------


def test_what_was_sealed_is_flushed_by_the_next_start() -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    world.save(1)
    world.run_one()
    world.run_one()
    world.crash()
    world.start()
    world.settle()
    for tier in ("nvme", "store"):
        assert world.steps_on(tier) == [1]
        world.check(tier)


def test_a_half_done_folder_is_collected_and_foreign_files_are_not() -> None:
    world = World([file_rules("nvme")])
    world.save(1)
    world.settle()
    prefix = "run/step-00000002-a0001/"
    disk = world.disks["nvme"]
    for name in ("rank-00000-of-00001.safetensors", "notes.txt"):
        with disk.create(prefix + name) as writer:
            writer.write(0, memoryview(b"abc"))
            writer.publish()
    world.crash()
    world.start()
    world.settle()
    left = [s.key for s in disk.scan("run/step-00000002-a0001/")]
    assert left == [prefix + "notes.txt"]
    assert world.steps_on("nvme") == [1]


def test_going_back_abandons_later_steps_and_collects_them_once_the_line_is_as_safe() -> None:
    world = World([file_rules("nvme"), file_rules("pfs", shared=True, flush_every=2)])
    for step in (1, 2, 3, 4):
        world.save(step)
        world.settle()
    assert world.steps_on("pfs") == [2, 4]
    world.crash()
    world.start()
    world.started_from = CheckpointId(1, 1)
    world.ordinal = 1
    world.save(2)  # ordinal 2: goes to nvme and pfs
    assert world.steps_on("nvme") == [1, 2, 3, 4]
    world.settle()
    listing = world.stores["nvme"].list()
    assert [str(c.id) for c in listing.copies] == ["1@1", "2@2"]
    assert [str(c.id) for c in world.stores["pfs"].list().copies] == ["2@2"]


def test_an_abandoned_line_stays_where_the_new_one_is_not_as_safe() -> None:
    world = World([file_rules("nvme"), file_rules("pfs", shared=True, flush_every=2)])
    for step in (1, 2, 3, 4):
        world.save(step)
        world.settle()
    world.crash()
    world.start()
    world.started_from = CheckpointId(2, 1)
    world.ordinal = 2
    world.save(3)  # ordinal 3: not flushed to pfs
    world.settle()
    assert [str(c.id) for c in world.stores["nvme"].list().copies] == ["1@1", "2@1", "3@2"]
    assert [str(c.id) for c in world.stores["pfs"].list().copies] == ["2@1", "4@1"]


def test_latest_never_goes_back_while_a_slow_start_flushes_old_steps() -> None:
    world = World([file_rules("nvme")])
    for step in (1, 2):
        world.save(step)
        world.settle()
    assert world.stores["nvme"].read_latest() == CheckpointId(2, 1)


KEYS = "run/step-*"


def faulty(inner: Backend, seed: int) -> Faulty:
    """A backend that fails now and then, before and after the fact, and cuts writes short."""
    plan = [
        Fault(kind=kind, operation=operation, keys=KEYS, chance=0.02, times=None)
        for kind in (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)
        for operation in (Operation.CREATE, Operation.WRITE, Operation.PUBLISH, Operation.READ)
    ]
    torn = FaultKind.TORN_WRITE
    plan.append(Fault(kind=torn, operation=Operation.WRITE, keys=KEYS, chance=0.05, times=None))
    return Faulty(inner, seed=seed, plan=plan)


def test_faults_by_seed_never_lose_what_was_committed() -> None:
    for seed in range(20):
        backends: list[Faulty] = []

        def wrap(
            name: str, inner: Backend, seed: int = seed, backends: list[Faulty] = backends
        ) -> Backend:
            backends.append(faulty(inner, seed))
            return backends[-1]

        world = World([file_rules("nvme", retain_last=2)], seed=seed, wrap=wrap)
        saved = 0
        for step in range(1, 6):
            answer = world.ask_for_region(step)
            world.settle(limit_s=30)
            if answer and answer[1] is None:
                snapshot = world.begin(step, answer[0])
                world.seal(snapshot)
                saved = step
            world.settle(limit_s=30)
        backends[0].stop()
        world.settle(limit_s=2000)
        world.check("nvme")
        assert world.steps_on("nvme")[-1] == saved


@pytest.mark.parametrize("goes_back_to", [CheckpointId(2, 1), None])
def test_what_a_line_leaves_behind_stays_so_when_the_tier_that_had_the_line_is_lost(
    goes_back_to: CheckpointId | None,
) -> None:
    """The other tier holds the old line, and gets none of the new one."""
    world = World([file_rules("nvme"), file_rules("pfs", shared=True)])
    for step in (1, 2, 3, 4):
        world.save(step)
        world.settle()
        world.started_from = CheckpointId(step, 1)
    world.crash()
    world.memory.regions.clear()
    world.rules = (world.rules[0], world.rules[1], replace(world.rules[2], flush_every=100))
    world.start()
    world.coordinator.ledger.continue_from(goes_back_to, attempt=2)
    world.started_from = goes_back_to
    world.save(3)
    world.settle()
    assert world.steps_on("pfs")[-1] == 4
    world.crash()
    world.memory.regions.clear()
    world.disks["nvme"]._objects.clear()
    world.start()
    left = world.coordinator.ledger.abandoned()
    known = {id for id in world.coordinator.ledger.entries}
    assert {id.step for id in known - set(left)} == ({1, 2} if goes_back_to else set())
