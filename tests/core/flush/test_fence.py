"""A process that is fenced by a newer attempt starts nothing more by itself, and answers all waiters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.door import Answer
from tests.simulation.world import SHARD, World, file_rules
from tierfall.backends.wrappers import Wrapper
from tierfall.core.flush.tasks import (
    CommandKind,
    DeleteCopy,
    FinishCopy,
    OpenShard,
)
from tierfall.core.format.records import Attempt
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
from tierfall.core.types.errors import FencedError, IntegrityError
from tierfall.core.types.values import CheckpointId, Codec, SaveOutcome, Shard
from tierfall.tiers.stored import StoredTier


def newer_attempt(world: World, tier: str = "nvme", *, number: int | None = None) -> None:
    """Another process starts the same run, and takes the next number, or one further on, as a start does that cannot
    ask a tier."""
    number = world.attempt.number + 1 if number is None else number
    StoredTier(name=tier, run="run", backend=world.disks[tier]).fence.create(
        Attempt(run="run", number=number, id="f" * 32, node="other", pid=77, wall_time_s=0.0)
    )


def until(world: World, kind: type) -> None:
    while not any(isinstance(task, kind) for task in world.tasks):
        assert world.run_one()


def test_a_save_that_begins_just_as_the_fence_falls_is_reported() -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    world.save(1)
    region, error = world.ask_for_region(2)
    assert error is None
    newer_attempt(world)
    world.settle()
    assert world.coordinator.fenced is not None
    snapshot = world.begin(2, region)
    world.step()
    for tier in ("nvme", "store"):
        with pytest.raises(FencedError):
            snapshot.handle.wait(tier, timeout=0)
    world.seal(snapshot)
    world.settle()
    assert snapshot.handle.outcome is SaveOutcome.FAILED
    assert not world.coordinator.busy()


def test_a_new_attempt_of_this_process_is_not_a_fence() -> None:
    """A restore leaves its attempt's record while a commit of the line before is under way."""
    world = World([file_rules("nvme")])
    handle = world.save(1)
    until(world, FinishCopy)
    before = world.attempt
    world.take_new_attempt()
    world.attempt, new = before, world.attempt  # it is on the tier, and not yet the session's own
    world.settle()
    assert world.coordinator.fenced is None
    assert handle.outcome is SaveOutcome.SAVED
    world.attempt, world.started_from = new, CheckpointId(1, 1)
    world.save_all(2)
    assert world.steps_on("nvme") == [1, 2]


def test_a_checkpoint_of_the_same_name_is_never_taken_for_ones_own() -> None:
    """A run that began anew while a tier could not be asked gave its first attempt's number twice."""
    old = World([file_rules("nvme")])
    old.save(1)
    old.settle()
    world = World([file_rules("nvme")])
    attempt = Attempt(run="run", number=1, id="e" * 32, node="n", pid=1, wall_time_s=0.0)
    world.attempt = attempt
    handle = world.save(1)
    world.disks["nvme"]._objects.clear()
    world.disks["nvme"]._objects.update(
        {k: v for k, v in old.disks["nvme"]._objects.items() if "/attempts/" not in k}
    )
    world.settle(limit_s=5)
    assert not handle.done("nvme")
    assert world.stores["nvme"].read_commit(CheckpointId(1, 1)).lineage.attempt_id != attempt.id
    old.check("nvme")
    world.settle()
    error = handle.exception()
    assert error is not None
    assert isinstance(error.__cause__, IntegrityError)
    assert "another checkpoint of that name" in str(error)


def test_a_checkpoint_of_the_same_name_is_not_collected_either() -> None:
    world = World([file_rules("nvme")])
    store = world.stores["nvme"]
    world.save_all(1)
    id = CheckpointId(1, 1)
    outcome = world.runner.run(DeleteCopy(tier="nvme", id=id, reason="test", unfinished=True))
    assert outcome.value == store.read_commit(id)
    entry = world.coordinator.ledger.entries[id]
    opened = world.runner.run(
        OpenShard(
            tier="nvme",
            id=id,
            attempt_id=entry.attempt_id,
            shard=SHARD,
            geometry=entry.geometry,
            pieces=None,
            source=None,
        )
    )
    assert opened.value == store.read_commit(id)  # its own, by a call whose answer was lost
    assert world.steps_on("nvme") == [1]


def test_a_record_of_other_ranks_images_does_not_make_a_rank_s_own_copy_committed() -> None:
    """As in peer memory, where a node finds what it keeps for another one."""
    world = World([file_rules("nvme")])
    world.save_all(1)
    task = DeleteCopy(
        tier="nvme", id=CheckpointId(1, 1), reason="test", unfinished=True, shard=Shard(1, 2)
    )
    outcome = world.runner.run(task)
    assert outcome.error is None
    assert outcome.value is None
    assert world.steps_on("nvme") == [1]


def disk_of(world: World, tier: str = "nvme") -> dict[str, bytes]:
    """Every object on a tier but the records of attempts."""
    return {k: bytes(v) for k, v in world.disks[tier]._objects.items() if "/attempts/" not in k}


def is_at_rest(world: World) -> bool:
    """Nothing is under way, and nothing is tried again."""
    done = len(world.trace)
    world.settle(limit_s=200.0)
    return len(world.trace) == done and not world.coordinator.busy()


def test_what_looks_unfinished_is_not_collected() -> None:
    """The newer start may be writing there."""
    world = World([file_rules("nvme")])
    key = "run/step-00000007-a0001/rank-00000-of-00001.safetensors"
    with world.disks["nvme"].create(key) as writer:
        writer.publish()
    world.crash()
    world.start()
    world.step()
    newer_attempt(world)
    world.settle()
    assert key in disk_of(world)
    assert isinstance(world.coordinator.fenced, FencedError)
    assert is_at_rest(world)


@pytest.mark.parametrize("kind", CommandKind)
def test_an_order_to_a_fenced_process_changes_nothing_and_says_why(kind: CommandKind) -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    world.save_all(1)
    id = CheckpointId(1, 1)
    if kind is CommandKind.UNPIN:
        assert world.order(CommandKind.PIN, id) == {}
    newer_attempt(world)
    newer_attempt(world, "store")
    before = {tier: disk_of(world, tier) for tier in world.disks}
    failed = world.order(kind, id)
    assert {tier: type(error) for tier, error in failed.items()} == dict.fromkeys(
        world.disks, FencedError
    )
    assert {tier: disk_of(world, tier) for tier in world.disks} == before
    assert is_at_rest(world), "it is tried again"


def test_a_deletion_that_waits_as_the_fence_falls_is_answered_and_a_later_one_refused() -> None:
    world = World([file_rules("nvme"), file_rules("store")])
    world.save_all(1, 2)
    ledger, first, second = world.coordinator.ledger, CheckpointId(1, 1), CheckpointId(2, 1)
    ledger.entries[first].lease("nvme", +1)  # something reads it there
    waiting: list[Answer] = []
    world.door.command(CommandKind.DELETE, first, waiting.append)
    world.step()
    world.run_all()
    assert world.steps_on("store") == [2]
    assert not waiting
    newer_attempt(world, "store")  # nvme is another disk for that process: nothing on it says so
    world.save_all(3)
    ledger.entries[first].lease("nvme", -1)
    world.settle()
    assert {tier: type(error) for tier, error in waiting[0].items()} == {"nvme": FencedError}
    before = disk_of(world)
    assert isinstance(world.order(CommandKind.DELETE, second)["tierfall"], FencedError)
    assert disk_of(world) == before
    assert is_at_rest(world)


FILES = {
    Codec.NONE: ("safetensors", "json"),
    Codec.ZSTD: ("safetensors.zst", "stored.json", "json"),
}


@pytest.mark.parametrize(
    ("codec", "suffix", "number"),
    [(codec, suffix, 2) for codec, ours in FILES.items() for suffix in ours]
    + [(Codec.NONE, "safetensors", 9)],
)
def test_files_of_a_newer_attempts_copy_are_not_written_over(
    codec: Codec, suffix: str, number: int
) -> None:
    """The newer start brings the same checkpoint to a tier, packed otherwise, while a flush of it was held up."""
    world = World([file_rules("nvme")], codecs={"nvme": codec})
    world.save(1)
    until(world, FinishCopy)
    finish = next(task for task in world.tasks if isinstance(task, FinishCopy))
    newer_attempt(world, number=number)
    key = f"run/step-00000001-a0001/rank-00000-of-00001.{suffix}"
    with world.disks["nvme"].create(key, length=5) as writer:
        writer.write(0, memoryview(b"newer"))
        writer.publish()
    world.run(finish)
    world.settle()
    assert disk_of(world) == {key: b"newer"}
    assert isinstance(world.coordinator.fenced, FencedError)


class BegunMeanwhile(Wrapper):
    """A disk where a newer attempt begins just before call number ``at``; ``made`` are the calls, each with its key."""

    def __init__(self, disk: Backend, at: int, number: int) -> None:
        super().__init__(disk)
        self._at, self._number = at, number
        self.made: list[tuple[str, str]] = []

    def _count(self, call: str, key: str) -> None:
        self.made.append((call, key))
        if len(self.made) == self._at:
            StoredTier(name="nvme", run="run", backend=self._inner).fence.create(
                Attempt(
                    run="run", number=self._number, id="f" * 32, node="n", pid=2, wall_time_s=0.0
                )
            )

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        self._count("create", key)
        return super().create(key, length=length, length_max=length_max, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._count("read", key)
        super().read_into(key, offset, view)

    def stat(self, key: str) -> StoredObject:
        self._count("stat", key)
        return super().stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        self._count("scan", prefix)
        return super().scan(prefix)


def saves_beside_a_newer_attempt(
    codec: Codec, at: int, number: int
) -> tuple[World, BegunMeanwhile, list[tuple[str, str]]]:
    """Save step 1, and then step 2, in which the newer attempt begins; return the calls of that one."""
    disks: list[BegunMeanwhile] = []

    def wrap(name: str, inner: Backend) -> Backend:
        disks.append(BegunMeanwhile(inner, 0, number))
        return disks[-1]

    world = World([file_rules("nvme")], codecs={"nvme": codec}, wrap=wrap)
    world.save_all(1)
    (disk,) = disks
    before = len(disk.made)
    disk._at = before + at if at else 0
    world.save_all(2)
    return world, disk, disk.made[before:]


@pytest.mark.parametrize(("codec", "number"), [(Codec.ZSTD, 2), (Codec.NONE, 9)])
def test_a_newer_attempt_that_begins_before_the_commit_looks_for_it_ends_that(
    codec: Codec, number: int
) -> None:
    _, _, made = saves_beside_a_newer_attempt(codec, 0, number)
    commit = made.index(("create", "run/step-00000002-a0001/commit.json"))
    assert made[commit - 1] == ("scan", "run/attempts/"), "nothing comes between"
    for at in range(1, commit + 1):
        world, _, _ = saves_beside_a_newer_attempt(codec, at, number)
        assert world.steps_on("nvme") == [1], f"it began before call {at}: {made[at - 1]}"
        assert isinstance(world.coordinator.fenced, FencedError)
