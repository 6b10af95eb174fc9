"""Faults strike where the plan says, the same way for the same seed, and leave nothing that a real one would not."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_places import files_below, get, put

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Publish, delete_all
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

DATA = bytes(range(256)) * 40


def memory_with(*plan: Fault, seed: int = 1) -> tuple[MemoryBackend, Faulty]:
    memory = MemoryBackend()
    put(memory, "run/key", b"old")
    return memory, Faulty(memory, seed=seed, plan=plan)


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_plan_every_promise_is_kept(name: str) -> None:
    check_promise(name, lambda: Faulty(MemoryBackend(), seed=1, plan=()))


def test_the_third_publish_of_a_pattern() -> None:
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.PUBLISH, keys="*/rank-*", first=3)
    memory, faulty = memory_with(fault)
    for number in range(2):
        put(faulty, f"step/rank-{number}", b"x")
        put(faulty, f"step/other-{number}", b"x")
    with pytest.raises(UnreachableError, match="publish 'step/rank-2' in memory: failed before"):
        put(faulty, "step/rank-2", b"x")
    put(faulty, "step/rank-3", b"x")
    assert [struck.key for struck in faulty.injected] == ["step/rank-2"]
    assert faulty.injected[0].fault is fault
    with pytest.raises(KeyNotFoundError):
        memory.stat("step/rank-2")


def test_after_a_lost_answer_the_work_is_done() -> None:
    memory, faulty = memory_with(
        *(Fault(kind=FaultKind.FAIL_AFTER, operation=each) for each in Operation)
    )
    with pytest.raises(UnreachableError, match="after it was done"):
        faulty.stat("run/key")
    with pytest.raises(UnreachableError):
        faulty.create("run/new")
    writer = faulty.create("run/new", length=1)
    with pytest.raises(UnreachableError):
        writer.write(0, memoryview(b"x"))
    with pytest.raises(UnreachableError):
        writer.publish()
    assert get(memory, "run/new") == b"x"
    with pytest.raises(UnreachableError):
        list(faulty.scan(""))
    with pytest.raises(UnreachableError):
        faulty.delete("run/new")
    assert [stored.key for stored in memory.scan("")] == ["run/key"]


def test_a_fault_strikes_one_of_several_deletions() -> None:
    for kind, gone in ((FaultKind.FAIL_BEFORE, 1), (FaultKind.FAIL_AFTER, 2)):
        memory, faulty = memory_with(Fault(kind=kind, operation=Operation.DELETE, keys="*b"))
        keys = ["run/a", "run/b", "run/c"]
        for key in keys:
            put(memory, key, b"x")
        with pytest.raises(UnreachableError, match="delete 'run/b'"):
            delete_all(faulty, keys)
        assert [each.key for each in memory.scan("")] == [*keys[gone:], "run/key"]
        assert [each.key for each in faulty.injected] == ["run/b"]


def test_a_listing_breaks_off_in_the_middle() -> None:
    memory, faulty = memory_with(Fault(kind=FaultKind.FAIL_AFTER, operation=Operation.SCAN))
    put(memory, "run/other", b"")
    scan = faulty.scan("run/")
    assert next(scan).key == "run/key"
    with pytest.raises(UnreachableError):
        next(scan)


def test_a_torn_write_arrives_in_part(tmp_path: Path) -> None:
    posix = PosixBackend(tmp_path)
    put(posix, "run/key", b"old")
    plan = [Fault(kind=FaultKind.TORN_WRITE, operation=Operation.WRITE, error=BackendError)]
    faulty = Faulty(posix, seed=3, plan=plan)
    with pytest.raises(BackendError, match="halfway"):
        put(faulty, "run/key", DATA)
    assert files_below(tmp_path) == ["run/key"]
    assert get(posix, "run/key") == b"old"
    posix.close()


def test_a_torn_write_that_may_pass_can_be_written_again() -> None:
    memory, faulty = memory_with(Fault(kind=FaultKind.TORN_WRITE, operation=Operation.WRITE))
    with faulty.create("run/key", length=len(DATA)) as writer:
        with pytest.raises(UnreachableError):
            writer.write(0, memoryview(DATA))
        writer.write(0, memoryview(DATA))
        writer.publish()
    assert get(memory, "run/key") == DATA


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_one_bit_is_flipped(operation: Operation) -> None:
    memory, faulty = memory_with(Fault(kind=FaultKind.BIT_FLIP, operation=operation))
    source = bytearray(DATA)
    with faulty.create("run/key") as writer:
        writer.write(0, memoryview(source))
        writer.publish()
    assert source == DATA, "the caller's memory was changed"
    found = get(faulty, "run/key")
    changed = [left ^ right for left, right in zip(found, DATA, strict=True) if left != right]
    assert len(changed) == 1
    assert changed[0].bit_count() == 1
    assert (get(memory, "run/key") == DATA) is (operation is Operation.READ)
    assert (get(faulty, "run/key") == DATA) is (operation is Operation.READ)


def test_a_stall_is_the_callers_to_end() -> None:
    stalled: list[str] = []
    fault = Fault(kind=FaultKind.STALL, operation=Operation.READ)
    memory = MemoryBackend()
    put(memory, "run/key", b"old")
    faulty = Faulty(memory, seed=1, plan=[fault], stall=stalled.append)
    assert get(faulty, "run/key") == b"old"
    assert get(faulty, "run/key") == b"old"
    assert stalled == ["run/key"]


def test_a_disk_that_is_full_stays_full_until_it_heals() -> None:
    fault = Fault(kind=FaultKind.DISK_FULL, operation=Operation.WRITE, after_bytes=100)
    memory, faulty = memory_with(fault)
    put(faulty, "run/a", bytes(60))
    put(faulty, "run/b", bytes(40))
    for _ in range(3):
        with pytest.raises(StorageFullError, match="write 'run/key'"):
            put(faulty, "run/key", b"x")
    faulty.delete("run/a")
    with pytest.raises(StorageFullError):
        put(faulty, "run/key", b"x")
    assert get(memory, "run/key") == b"old"
    faulty.stop()
    put(faulty, "run/key", b"x")
    assert get(memory, "run/key") == b"x"


def test_a_writer_that_met_a_full_disk_is_dead(tmp_path: Path) -> None:
    posix = PosixBackend(tmp_path)
    plan = [Fault(kind=FaultKind.DISK_FULL, operation=Operation.WRITE, after_bytes=1)]
    faulty = Faulty(posix, seed=1, plan=plan)
    writer = faulty.create("run/key")
    writer.write(0, memoryview(b"x"))
    with pytest.raises(StorageFullError):
        writer.write(1, memoryview(b"y"))
    assert files_below(tmp_path) == []
    faulty.stop()
    with pytest.raises(BackendError, match="dead"):
        writer.write(1, memoryview(b"y"))
    posix.close()


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_a_publish_that_may_pass_can_be_asked_for_again(tmp_path: Path, kind: FaultKind) -> None:
    posix = PosixBackend(tmp_path)
    plan = [Fault(kind=kind, operation=Operation.PUBLISH, times=2)]
    with Faulty(posix, seed=1, plan=plan).create("run/key") as writer:
        writer.write(0, memoryview(DATA))
        for _ in range(2):
            with pytest.raises(UnreachableError):
                writer.publish()
        writer.publish()
        with pytest.raises(BackendError, match="published"):
            writer.publish()
    assert get(posix, "run/key") == DATA
    posix.close()


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_a_publish_that_cannot_pass_kills_the_writer(tmp_path: Path, kind: FaultKind) -> None:
    posix = PosixBackend(tmp_path)
    plan = [Fault(kind=kind, operation=Operation.PUBLISH, error=AccessDeniedError)]
    writer = Faulty(posix, seed=1, plan=plan).create("run/key")
    writer.write(0, memoryview(DATA))
    with pytest.raises(AccessDeniedError):
        writer.publish()
    with pytest.raises(BackendError, match="create a new one"):
        writer.publish()
    assert files_below(tmp_path) == (["run/key"] if kind is FaultKind.FAIL_AFTER else [])
    posix.close()


@pytest.mark.parametrize("mode", Publish)
def test_a_lost_sync_loses_the_object(tmp_path: Path, mode: Publish) -> None:
    posix = PosixBackend(tmp_path)
    plan = [Fault(kind=FaultKind.LOST_SYNC, operation=Operation.PUBLISH)]
    writer = Faulty(posix, seed=1, plan=plan).create("run/key", publish=mode)
    writer.write(0, memoryview(DATA))
    with pytest.raises(BackendError, match="count as lost") as caught:
        writer.publish()
    assert not caught.value.retryable
    assert files_below(tmp_path) == []
    with pytest.raises(BackendError):
        writer.publish()
    posix.close()


def _chances(seed: int, order: list[str]) -> list[bool]:
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.STAT, times=None, chance=0.5)
    _, faulty = memory_with(fault, seed=seed)
    found: dict[str, list[bool]] = {key: [] for key in sorted(order)}
    for key in order:
        try:
            faulty.stat(key)
        except UnreachableError:
            found[key].append(True)
        except KeyNotFoundError:
            found[key].append(False)
    return [each for key in sorted(found) for each in found[key]]


def test_chance_follows_the_seed_and_not_the_order_of_keys() -> None:
    order = ["a", "b"] * 50
    first = _chances(1, order)
    assert first == _chances(1, order)
    assert first == _chances(1, sorted(order))
    assert first != _chances(2, order)
    assert 20 < sum(first) < 80


def test_an_error_of_choice() -> None:
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.CREATE, error=AccessDeniedError)
    _, faulty = memory_with(fault)
    with pytest.raises(AccessDeniedError):
        faulty.create("run/new")


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (FaultKind.TORN_WRITE, Operation.READ),
        (FaultKind.BIT_FLIP, Operation.STAT),
        (FaultKind.DISK_FULL, Operation.PUBLISH),
        (FaultKind.LOST_SYNC, Operation.WRITE),
    ],
)
def test_a_fault_that_cannot_be_is_refused(kind: FaultKind, operation: Operation) -> None:
    with pytest.raises(ValueError, match="does not apply"):
        Fault(kind=kind, operation=operation)


def test_what_was_not_synced_goes_with_the_power() -> None:
    """Unless it was written anew, or its folder was synced, before."""
    fault = Fault(kind=FaultKind.UNSYNCED, operation=Operation.PUBLISH, times=3)
    memory, faulty = memory_with(fault)
    for key in ("run/lost", "run/anew", "other/synced"):
        with pytest.raises(BackendError, match="may not survive a power cut") as caught:
            put(faulty, key, DATA)
        assert not caught.value.retryable
        assert get(faulty, key) == DATA, "it is visible"
    put(faulty, "run/anew", DATA)
    faulty.sync("other")
    assert faulty.traits.needs_sync
    assert faulty.cut_power() == ("run/lost",)
    assert faulty.cut_power() == ()
    assert {key: get(memory, key) for key in ("run/anew", "other/synced", "run/key")} == {
        "run/anew": DATA,
        "other/synced": DATA,
        "run/key": b"old",
    }
