"""Commands, other copies and long pauses while a copy stalls: nothing is acknowledged that is not done."""

from __future__ import annotations

import pytest

from tests.core.scheduler.test_stalled_copies import failing, opened, world_with
from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.simulation.world import World, file_rules
from tierfall.backends.wrappers.retry import Retrying
from tierfall.core.runtime.retries import LONGEST_S
from tierfall.core.scheduler.ledger.tasks import Command, CommandKind, CommitCopy, DeleteCopy
from tierfall.core.types import keys as names
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import AccessDeniedError
from tierfall.core.types.values import CheckpointId, Codec, SaveOutcome

FIRST = CheckpointId(1, 1)
LOST_COMMIT = Fault(
    kind=FaultKind.FAIL_AFTER, operation=Operation.PUBLISH, keys="*/commit.json", times=1
)


def until_end_is_open(world: World) -> None:
    """Go on until the end of the copy was tried, and failed in a way that may pass."""
    while not any(isinstance(task, CommitCopy) for task in world.tasks):
        world.step()
        assert world.run_one(), "the end was not reached"
    world.run_all()
    assert world.coordinator.commits.is_committing(FIRST), "the end did not stall"


def give(world: World, kind: CommandKind) -> list[dict[str, BaseException]]:
    answer: list[dict[str, BaseException]] = []
    world.coordinator.post(Command(kind=kind, id=FIRST, wall_time_s=0.0, on_answer=answer.append))
    world.step()
    return answer


@pytest.mark.parametrize("codec", Codec)
def test_a_deletion_during_an_open_end_waits_and_is_then_true(codec: Codec) -> None:
    world, _ = world_with(LOST_COMMIT, codec=codec)
    world.save(1)
    until_end_is_open(world)
    assert world.stores["nvme"].is_committed(FIRST), "committed, though nobody was told"
    answer = give(world, CommandKind.DELETE)
    assert answer == [], "not before it is known what is there"
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == []
    assert world.stores["nvme"].files(FIRST) == ()
    world.crash()
    world.start()
    world.settle()
    assert world.steps_on("nvme") == []


def test_an_unpin_during_an_open_end_is_not_undone_by_it() -> None:
    fault = failing(Operation.PUBLISH, keys="*/commit.json", times=2)
    world, _ = world_with(fault)
    region, _error = world.ask_for_region(1)
    world.seal(world.begin(1, region))
    give(world, CommandKind.PIN)
    until_end_is_open(world)
    assert names.PIN_MARK in world.stores["nvme"].marks(FIRST)
    answer = give(world, CommandKind.UNPIN)
    world.settle()
    assert answer == [{}]
    assert world.steps_on("nvme") == [1]
    assert names.PIN_MARK not in world.stores["nvme"].marks(FIRST)
    assert not world.coordinator.ledger.entries[FIRST].pinned


def test_no_copy_begins_while_the_commit_of_another_is_refused() -> None:
    """A rule would plan without the other, and count the room that it takes as free."""
    world, _ = world_with(failing(Operation.PUBLISH, keys="*/commit.json", times=2))
    world.save(1)
    world.save(2)
    until_end_is_open(world)
    assert not world.tasks
    world.settle()
    assert world.steps_on("nvme") == [1, 2]
    committed = world.trace.index("CommitCopy 1@1 on nvme: done")
    assert committed < world.trace.index("OpenShard 2@1 on nvme: done")


def test_what_is_found_committed_after_its_deletion_goes_too() -> None:
    world, _ = world_with()
    world.save(1)
    world.settle()
    assert world.order(CommandKind.DELETE, FIRST) == {}
    assert FIRST not in world.coordinator.ledger.entries
    world.save(2)
    world.settle()
    # A commit whose answer was lost, found while leftovers are collected: as the disk may hold it after all.
    other, _ = world_with()
    other.save(1)
    other.settle()
    for key, data in other.disks["nvme"]._objects.items():
        if "step-00000001" in key:
            world.disks["nvme"]._objects[key] = data
    task = DeleteCopy(tier="nvme", id=FIRST, reason="test", unfinished=True)
    world.coordinator.deleter.delete(task)
    world.settle()
    assert world.steps_on("nvme") == [2]


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.CREATE])
def test_an_outage_of_days_ends_like_one_of_minutes(operation: Operation) -> None:
    world, faulty = world_with(failing(operation, times=None))
    handle = world.save(1)
    world.settle(limit_s=2 * 24 * 3600)
    assert world.now_s > 24 * 3600
    faulty.stop()
    world.settle()
    assert handle.outcome is SaveOutcome.SAVED
    assert world.steps_on("nvme") == [1]


def test_progress_makes_the_next_glitch_a_first_one_even_after_a_refusal() -> None:
    refusal = Fault(
        kind=FaultKind.FAIL_BEFORE,
        operation=Operation.WRITE,
        keys="*/rank-*",
        error=AccessDeniedError,
    )
    glitches = [failing(Operation.WRITE, first=n) for n in (3, 5, 7, 9)]
    world, _ = world_with(refusal, *glitches)
    world.save(1)
    world.settle()
    assert world.steps_on("nvme") == [1]
    assert world.now_s < 5, "waits did not grow from glitch to glitch"
    assert world.coordinator.errors == []


def test_the_copy_after_one_that_was_deleted_while_it_stalled_does_not_wait() -> None:
    world, faulty = world_with(failing(Operation.WRITE, times=None))
    world.save(1)
    world.settle(limit_s=200)
    lane = world.coordinator.lanes["nvme"]
    assert lane.not_before_s > world.now_s - LONGEST_S
    faulty.stop()
    began_s = world.now_s
    assert world.order(CommandKind.DELETE, FIRST) == {}
    world.save(2)
    world.run_all()
    assert world.steps_on("nvme") == [2]
    assert world.now_s - began_s < LONGEST_S


def test_a_stalled_copy_that_memory_gives_up_leaves_the_tier_in_trouble_until_the_next_advances() -> (
    None
):
    world, faulty = world_with(failing(Operation.WRITE, times=None))
    for step in (1, 2, 3):
        world.save(step)
    world.settle(limit_s=200)
    coordinator, lane = world.coordinator, world.coordinator.lanes["nvme"]
    assert "nvme" in coordinator.ledger.failing
    since_s, not_before_s = lane.failing_since_s, lane.not_before_s
    assert not_before_s > world.now_s
    world.save(4)
    world.run_all()
    assert FIRST not in coordinator.ledger.entries, "memory was full"
    assert (lane.failing_since_s, lane.not_before_s) == (since_s, not_before_s)
    faulty.stop()
    while not (lane.active is not None and lane.active.done):
        world.now_s = max(world.now_s, world.step() or 0.0)
        world.run_one()
    assert "nvme" not in coordinator.ledger.failing
    assert lane.failing_since_s is None


@pytest.mark.parametrize("keys", ["*/marks/pin", "*/commit.json", "*/attempts/*"])
def test_a_lost_answer_to_a_small_object_does_not_send_the_image_again(keys: str) -> None:
    lost = Fault(kind=FaultKind.FAIL_AFTER, operation=Operation.PUBLISH, keys=keys)

    def wrap(name: str, inner: Backend) -> Backend:
        return Retrying(Faulty(inner, seed=0, plan=[lost]), sleep=lambda s: None)

    if "attempts" in keys:
        lost = Fault(
            kind=FaultKind.FAIL_AFTER, operation=Operation.PUBLISH, keys="run/attempts/a0002*"
        )
    world = World([file_rules("nvme")], wrap=wrap)
    if (
        "attempts" in keys
    ):  # written by the first look at the fence: it could not be reached at open
        world.attempt = world.attempt.__class__(
            run="run", number=2, id="f" * 32, node="n", pid=1, wall_time_s=0.0
        )
    region, error = world.ask_for_region(1)
    assert error is None
    world.seal(world.begin(1, region))
    id = CheckpointId(1, world.attempt.number)
    world.coordinator.post(
        Command(kind=CommandKind.PIN, id=id, wall_time_s=0.0, on_answer=lambda failed: None)
    )
    world.settle()
    assert world.steps_on("nvme") == [1]
    runs = [line for line in world.trace if line.startswith("CopyRun")]
    assert len(runs) == 4, "each chunk once"
    assert names.PIN_MARK in world.stores["nvme"].marks(id)


def test_what_an_earlier_start_left_in_another_form_goes_first() -> None:
    world, faulty = world_with(failing(Operation.CREATE, keys="*/commit.json", times=None))
    world.save(1)
    until_end_is_open(world)
    assert any(f.key.endswith(".safetensors") for f in world.stores["nvme"].files(FIRST))
    faulty.stop()
    world.codecs = {"nvme": Codec.ZSTD}
    world.crash()
    world.start()
    world.settle()
    assert world.steps_on("nvme") == [1]
    stored = {file.key for file in world.stores["nvme"].files(FIRST)}
    assert not any(name.endswith(".safetensors") for name in stored), stored
    held = sum(file.bytes for file in world.stores["nvme"].files(FIRST))
    commit = world.stores["nvme"].read_commit(FIRST)
    assert held == commit.stored_bytes + len(commit.encode())


def test_a_packed_copy_that_fails_in_its_middle_goes_on_from_there() -> None:
    world, _ = world_with(failing(Operation.WRITE, first=2, times=3), codec=Codec.ZSTD)
    world.save(1)
    world.settle()
    failed = [t for t in world.trace if t.startswith("CopyRun") and "on purpose" in t]
    assert failed, "a part was sent, and failed, while chunks were still coming"
    assert opened(world) == 1
    world.check("nvme")
