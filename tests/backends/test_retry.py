"""What is tried again, how long apart, and what must never be said twice."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest
from backend_places import fail, files_below, get, put

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.wrappers import Retrying, RetryPolicy, Wrapper
from tierfall.core.types.backend import Backend, Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    UnreachableError,
)


class Waits:
    """A sleep that only writes down how long it was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def __call__(self, wait_s: float) -> None:
        self.asked.append(wait_s)


def faulty(*plan: Fault) -> tuple[MemoryBackend, Faulty]:
    memory = MemoryBackend()
    put(memory, "run/key", b"bytes")
    put(memory, "run/other", b"more")
    return memory, Faulty(memory, seed=1, plan=plan)


def retrying(inner: Backend, waits: Waits, *, tries: int = 4) -> Retrying:
    retry = RetryPolicy(
        tries=tries, first_wait_s=1.0, longest_wait_s=3.0, sleep=waits, rng=Random(7)
    )
    return Retrying(inner, retry)


def call(backend: Backend, operation: Operation) -> object:
    match operation:
        case Operation.READ:
            return get(backend, "run/key")
        case Operation.STAT:
            return backend.stat("run/key").bytes
        case Operation.SCAN:
            return [stored.key for stored in backend.scan("run/")]
        case Operation.DELETE:
            return backend.delete("run/key")
        case Operation.SYNC:
            return backend.sync("run") if isinstance(backend, Wrapper) else None
        case _:
            return put(backend, "run/key", b"bytes")


REPEATABLE = list(Operation)


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("operation", REPEATABLE)
def test_what_may_be_repeated_is(operation: Operation, kind: FaultKind) -> None:
    waits = Waits()
    memory, storage = faulty(Fault(kind=kind, operation=operation, times=3))
    writing = (Operation.CREATE, Operation.WRITE, Operation.PUBLISH)
    expected = call(MemoryBackend() if operation in writing else memory, operation)
    result = call(retrying(storage, waits), operation)
    assert result == expected
    assert len(storage.injected) == 3
    assert len(waits.asked) == 3
    if operation in writing:
        assert get(memory, "run/key") == b"bytes"


@pytest.mark.parametrize("operation", REPEATABLE)
def test_it_gives_up_with_the_last_error_as_it_was(operation: Operation) -> None:
    waits = Waits()
    _, storage = faulty(Fault(kind=FaultKind.FAIL_BEFORE, operation=operation, times=None))
    with pytest.raises(UnreachableError, match="on purpose") as caught:
        call(retrying(storage, waits), operation)
    assert len(storage.injected) == 4
    assert caught.value.__notes__ == ["given up after 4 tries"]


def test_waits_double_up_to_a_bound_and_differ_by_chance() -> None:
    waits = Waits()
    _, storage = faulty(Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.STAT, times=None))
    with pytest.raises(UnreachableError):
        retrying(storage, waits, tries=6).stat("run/key")
    assert len(waits.asked) == 5
    for wait_s, full_s in zip(waits.asked, (1.0, 2.0, 3.0, 3.0, 3.0), strict=True):
        assert full_s / 2 <= wait_s <= full_s
    assert len(set(waits.asked)) == 5


@pytest.mark.parametrize("error", [AccessDeniedError, KeyNotFoundError, BackendError])
def test_an_answer_is_not_asked_for_again(error: type[BackendError]) -> None:
    waits = Waits()
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.STAT, times=None, error=error)
    _, storage = faulty(fault)
    with pytest.raises(error):
        retrying(storage, waits).stat("run/key")
    assert len(storage.injected) == 1
    assert waits.asked == []


def test_a_writer_that_died_at_its_publish_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's writer does not outlive a failed publish; the first error is the reason, and is chained."""
    posix, waits = PosixBackend(tmp_path), Waits()
    with retrying(posix, waits).create("run/key") as writer:
        writer.write(0, memoryview(b"bytes"))
        fail(monkeypatch, "replace", errno.EIO)
        with pytest.raises(BackendError, match="dead") as caught:
            writer.publish()
    first = caught.value.__cause__
    assert isinstance(first, UnreachableError)
    assert os.strerror(errno.EIO) in str(first)
    assert str(first) in str(caught.value)
    assert len(waits.asked) == 1
    assert files_below(tmp_path) == []
    posix.close()


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_a_conditional_create_without_an_answer_is_not_tried_again(kind: FaultKind) -> None:
    """After a lost answer a second try would lose to the first, and take itself for somebody else."""
    memory, storage = faulty(Fault(kind=kind, operation=Operation.PUBLISH, times=None))
    waits = Waits()
    backend = retrying(storage, waits)
    with backend.create("run/new", publish=Publish.IF_ABSENT) as writer:
        with pytest.raises(UnreachableError):
            writer.publish()
        assert not waits.asked
    there = [stored.key for stored in memory.scan("run/")]
    assert ("run/new" in there) is (kind is FaultKind.FAIL_AFTER)


def test_a_listing_that_broke_off_is_not_handed_out_twice() -> None:
    _, storage = faulty(Fault(kind=FaultKind.FAIL_AFTER, operation=Operation.SCAN, times=2))
    found = [stored.key for stored in retrying(storage, Waits()).scan("")]
    assert found == ["run/key", "run/other"]
