"""Addresses, copies, aligned memory and the pool of blocks."""

from __future__ import annotations

import array
import ctypes

import pytest

from tierfall.backends.toolkit.views import BouncePool, address_of, aligned_block, copy_bytes, flat
from tierfall.core.types.errors import BackendError


def test_address_of_writable_and_read_only_memory() -> None:
    data = bytearray(b"0123456789")
    view = memoryview(data)
    assert ctypes.string_at(address_of(view), 10) == data
    assert ctypes.string_at(address_of(view[3:5].toreadonly()), 2) == b"34"
    assert address_of(view[3:]) == address_of(view) + 3
    assert ctypes.string_at(address_of(memoryview(b"constant")), 8) == b"constant"
    view.release()
    data += b"the memory is free to move again"


@pytest.mark.parametrize("alignment", [1, 512, 4096, 65_536])
def test_aligned_blocks_are_aligned_zero_and_of_their_size(alignment: int) -> None:
    for size in (0, 1, 4096, 100_001):
        block = aligned_block(size, alignment)
        assert block.nbytes == size
        assert bytes(block) == bytes(size)
        assert size == 0 or address_of(block) % alignment == 0


def test_flat_takes_any_contiguous_view() -> None:
    numbers = memoryview(array.array("q", [1, 2]))
    assert flat(numbers).format == "B"
    assert flat(numbers).nbytes == 16
    assert flat(memoryview(b"")).nbytes == 0
    assert flat(memoryview((ctypes.c_int * 0)()), writable=True).nbytes == 0


def test_flat_refuses_what_cannot_be_used() -> None:
    with pytest.raises(BackendError, match="contiguous"):
        flat(memoryview(b"0123")[::2])
    with pytest.raises(BackendError, match="read-only"):
        flat(memoryview(b"0123"), writable=True)


def test_copies_are_checked() -> None:
    target = memoryview(bytearray(4))
    copy_bytes(target, memoryview(b"0123"))
    assert target == b"0123"
    copy_bytes(target[:0], memoryview(b""))
    for other, source in ((target, b"012"), (target.toreadonly(), b"0123")):
        with pytest.raises(ValueError, match="cannot copy"):
            copy_bytes(other, memoryview(source))


def test_the_pool_hands_out_each_block_once_and_keeps_a_few() -> None:
    pool = BouncePool(block_bytes=8192, alignment_bytes=4096, keep=1)
    with pool.block() as one, pool.block() as other:
        first, second = address_of(one), address_of(other)
        assert first != second
        assert first % 4096 == second % 4096 == 0
    with pool.block() as again:
        assert address_of(again) == second
