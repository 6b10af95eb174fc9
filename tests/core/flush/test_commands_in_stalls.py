"""Commands, other copies and long pauses while a copy stalls: nothing is acknowledged that is not done."""

from __future__ import annotations

import pytest

from tests.core.flush.test_stalled_copies import failing, world_with
from tests.faults import Fault, FaultKind, Operation
from tests.simulation.world import World
from tierfall.core.flush.tasks import Command, CommandKind, CommitCopy
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
    assert FIRST in {id for _, id in world.coordinator.ledger.committing}, "the end did not stall"


def give(world: World, kind: CommandKind) -> list[dict[str, BaseException]]:
    answer: list[dict[str, BaseException]] = []
    world.coordinator.post(Command(kind=kind, id=FIRST, on_answer=answer.append))
    world.step()
    return answer


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
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


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.CREATE])
def test_an_outage_of_hours_ends_like_one_of_minutes(operation: Operation) -> None:
    world, faulty = world_with(failing(operation, times=None))
    handle = world.save(1)
    world.settle(limit_s=4 * 3600)
    assert world.now_s > 2 * 3600
    faulty.stop()
    world.settle()
    assert handle.outcome is SaveOutcome.SAVED
    assert world.steps_on("nvme") == [1]


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
