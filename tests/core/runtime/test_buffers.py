"""Read buffers: aligned, reused, and never more of them than configured."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest
import torch

from tests.core.fake_device import FakeLocks, FakeMark
from tierfall.core.runtime.buffers import BufferPool

PATIENCE_S = 20.0
DEVICE = torch.device("cuda", 0)


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("bytes", [1, 4096, 4097, 3 << 20])
def test_a_buffer_is_large_enough_aligned_and_writable(bytes: int) -> None:
    pool = BufferPool(bytes=bytes, count=1)
    with pool.lend_view(bytes) as buffer:
        assert len(buffer) >= bytes
        assert len(buffer) % mmap.PAGESIZE == 0
        assert address(buffer) % mmap.PAGESIZE == 0
        buffer[bytes - 1] = 7
        assert buffer[bytes - 1] == 7


def test_with_all_out_the_next_taker_waits_for_one_to_come_back() -> None:
    pool = BufferPool(bytes=4096, count=1)
    got: list[int] = []
    asking = threading.Event()

    def take() -> None:
        asking.set()
        with pool.lend_view(1) as buffer:
            got.append(address(buffer))

    with pool.lend_view(1) as held:
        place = address(held)
        thread = threading.Thread(target=take)
        thread.start()
        assert asking.wait(PATIENCE_S)
        assert got == []
    thread.join(PATIENCE_S)
    assert got == [place]


def test_a_buffer_comes_back_though_its_taker_failed() -> None:
    pool = BufferPool(bytes=4096, count=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), pool.lend_view(1):
            raise ZeroDivisionError
    with pool.lend_view(1) as buffer:
        assert len(buffer) == 4096


def test_what_is_larger_than_the_pools_buffers_is_lent_once_and_holds_up_nobody() -> None:
    pool = BufferPool(bytes=4096, count=1)
    with pool.lend_view(1), pool.lend_view(100_000) as large, pool.lend_view(200_000) as larger:
        assert len(large) >= 100_000
        assert len(larger) >= 200_000


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
