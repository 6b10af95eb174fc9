"""Buffers that reads go through: aligned, used again, never more of them than was said."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest

from tierfall.core.buffers import BufferPool

PATIENCE_S = 20.0


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("bytes", [1, 4096, 4097, 3 << 20])
def test_a_buffer_is_large_enough_aligned_and_writable(bytes: int) -> None:
    pool = BufferPool(bytes=bytes, count=1)
    with pool.take(bytes) as buffer:
        assert len(buffer) >= bytes
        assert len(buffer) % mmap.PAGESIZE == 0
        assert address(buffer) % mmap.PAGESIZE == 0
        buffer[bytes - 1] = 7
        assert buffer[bytes - 1] == 7


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool(bytes=4096, count=2)
    with pool.take(10) as first:
        place = address(first)
    for _ in range(3):
        with pool.take(4096) as again:
            assert address(again) == place


def test_two_takers_get_two_buffers() -> None:
    pool = BufferPool(bytes=4096, count=2)
    with pool.take(1) as first, pool.take(1) as second:
        assert abs(address(first) - address(second)) >= 4096


def test_with_all_out_the_next_taker_waits_for_one_to_come_back() -> None:
    pool = BufferPool(bytes=4096, count=1)
    got: list[int] = []
    asking = threading.Event()

    def take() -> None:
        asking.set()
        with pool.take(1) as buffer:
            got.append(address(buffer))

    with pool.take(1) as held:
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
        with pytest.raises(ZeroDivisionError), pool.take(1):
            raise ZeroDivisionError
    with pool.take(1) as buffer:
        assert len(buffer) == 4096


def test_what_is_larger_than_the_pools_buffers_is_lent_once_and_holds_up_nobody() -> None:
    pool = BufferPool(bytes=4096, count=1)
    with pool.take(1), pool.take(100_000) as large, pool.take(200_000) as larger:
        assert len(large) >= 100_000
        assert len(larger) >= 200_000
