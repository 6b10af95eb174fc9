"""Read buffers: aligned, reused, and never more of them than configured."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from tests.core.fake_device import FakeLocks, FakeMark
from tierfall.core.runtime.buffers import BufferPool

PATIENCE_S = 20.0
DEVICE = torch.device("cuda", 0)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


# What a device reads on ------------------------------------------------------------------------------


def lend_to_a_device(pool: BufferPool) -> tuple[int, FakeMark]:
    mark = FakeMark()
    with pool.lend(1) as buffer:
        buffer.events.append(mark)
        return buffer.address, mark


def test_a_buffer_that_a_device_reads_is_lent_again_only_once_that_is_over() -> None:
    pool = BufferPool(bytes=4096, count=1)
    place, mark = lend_to_a_device(pool)
    got: list[int] = []

    def take() -> None:
        with pool.lend_view(1) as view:
            got.append(address(view))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert mark.awaited.wait(PATIENCE_S)
    assert got == []
    mark.done.set()
    thread.join(PATIENCE_S)
    assert got == [place]


def test_a_failure_on_the_device_is_raised_once_to_whoever_waits_for_it_and_the_buffer_comes_back() -> (
    None
):
    pool = BufferPool(bytes=4096, count=1)
    place, mark = lend_to_a_device(pool)
    mark.error = RuntimeError("an illegal memory access")
    threading.Timer(0.05, mark.done.set).start()
    with pytest.raises(RuntimeError, match="illegal"), pool.lend_view(1):
        raise AssertionError("it was lent")
    with pool.lend_view(1) as again:
        assert address(again) == place


def test_pages_of_a_buffer_are_locked_once_and_unlocked_when_the_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks = FakeLocks(monkeypatch)
    pool = BufferPool(bytes=10_000, count=1)
    mark = FakeMark()
    for _ in range(3):
        with pool.lend(1) as buffer:
            pool.lock_pages(buffer, DEVICE)
            place = buffer.address
    with pool.lend(1) as buffer:
        buffer.events.append(mark)
    del buffer
    assert [lock.length_bytes for lock in locks.made] == [pool.bytes]
    locks.on_unlock = lambda: None if mark.is_done() else pytest.fail("a device reads it")
    thread = threading.Thread(target=pool.release, daemon=True)
    thread.start()
    assert mark.awaited.wait(PATIENCE_S)
    mark.done.set()
    thread.join(PATIENCE_S)
    assert locks.unlocked == [place]
    pool.release()
    assert locks.unlocked == [place]
    with pool.lend(1) as buffer:  # a fresh one
        pool.lock_pages(buffer, DEVICE)
    assert len(locks.made) == 2
    pool.release()
