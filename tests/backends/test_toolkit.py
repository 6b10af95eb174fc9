"""What the toolkit gives to backends: what may be a key, which ranges were written, and views of memory."""

from __future__ import annotations

import array
import ctypes
import string

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tierfall.backends.toolkit.base import Coverage
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_component,
    is_key,
    is_unfinished,
    unfinished_name,
)
from tierfall.backends.toolkit.views import BouncePool, address_of, aligned_block, copy_bytes, flat
from tierfall.core.types.errors import BackendError, KeyInvalidError

# Keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "gpt/step-00000400-a0007/rank-00000-of-00004.safetensors",
        "gpt/attempts/a0007.json",
        "...",
        "a..b",
        ".hidden",
        "l" * 255,
        "/".join(["p" * 127] * 8),
        "é" * 127 + "x",
    ],
)
def test_valid(key: str) -> None:
    assert check_key(key) == key
    assert is_key(key)
    assert check_prefix(key + "/") == key + "/"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("/a", "empty"),
        ("a/", "empty"),
        ("a//b", "empty"),
        ("..", "leads out"),
        ("a/../../etc/passwd", "leads out"),
        ("a/.", "leads out"),
        ("a\\..\\b", "separator"),
        ("a\0b", "control"),
        ("a\rb", "control"),
        ("\x7f", "control"),
        ("\x9f", "control"),
        ("\ud800", "control"),
        ("l" * 256, "longer than 255"),
        ("é" * 128, "longer than 255"),
        ("/".join(["p" * 127] * 8) + "/p", "longer than 1024"),
        (".tierfall-1-0123456789abcdef.part", "kept for unfinished"),
        ("run/.tierfall-x", "kept for unfinished"),
        ("run/.TierFall-x/y", "kept for unfinished"),
        (None, "no text"),
        (b"bytes", "no text"),
    ],
)
def test_invalid(key: str, reason: str) -> None:
    with pytest.raises(KeyInvalidError, match=reason) as caught:
        check_key(key)
    assert isinstance(caught.value, (BackendError, ValueError))
    assert not is_key(key)


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "\0/", None, ".tierfall-x/"])
def test_invalid_prefix(prefix: str) -> None:
    with pytest.raises(KeyInvalidError):
        check_prefix(prefix)


def test_the_empty_prefix_is_valid() -> None:
    assert check_prefix("") == ""


def test_no_unfinished_name_is_a_part() -> None:
    names = {unfinished_name() for _ in range(100)}
    assert len(names) == 100
    assert all(is_unfinished(name) for name in names)
    assert not any(is_component(name) or is_key(name) for name in names)
    assert not is_unfinished(".tierfall-note")
    assert not is_unfinished("commit.json")
    assert not is_unfinished(unfinished_name() + "x")
    assert not is_unfinished(unfinished_name() + "\n")


@given(st.text())
def test_a_valid_key_stays_below_its_root(key: str) -> None:
    if not is_key(key):
        return
    parts = key.split("/")
    assert not {"", ".", ".."} & set(parts)
    assert all(len(part.encode()) <= 255 for part in parts)
    assert not set(key) & set(map(chr, range(32)))


@given(st.lists(st.text(string.ascii_letters + string.digits + "._-%", min_size=1), min_size=1))
def test_plain_names_are_valid_but_for_the_dots_and_the_length(parts: list[str]) -> None:
    key = "/".join(parts)
    plain = all(part not in (".", "..") and len(part) <= 255 for part in parts)
    reserved = any(part.lower().startswith(".tierfall-") for part in parts)
    assert is_key(key) is (plain and not reserved and len(key) <= 1024)


# Ranges ---------------------------------------------------------------------------------------------

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20)


@given(spans, st.none() | st.integers(0, 50))
def test_against_a_set_of_positions(added: list[tuple[int, int]], length: int | None) -> None:
    coverage, positions = Coverage(), set()
    for start, size in added:
        coverage.add(start, start + size)
        positions |= set(range(start, start + size))
    end = max(positions) + 1 if positions else 0
    assert coverage.end == end
    whole = positions == set(range(end if length is None else length))
    assert (coverage.missing(length) is None) is whole


@pytest.mark.parametrize(
    ("added", "length", "text"),
    [
        ([(0, 4), (5, 10)], 10, "9 of 10 bytes"),
        ([(0, 4), (0, 4)], 8, "4 of 8 bytes"),
        ([(0, 9)], 8, "9 bytes were written, 8 expected"),
        ([(1, 9)], None, "8 of 9 bytes"),
        ([], 1, "0 of 1 bytes"),
    ],
)
def test_what_is_missing_is_counted(
    added: list[tuple[int, int]], length: int | None, text: str
) -> None:
    coverage = Coverage()
    for start, end in added:
        coverage.add(start, end)
    assert text in (coverage.missing(length) or "")


# Views ----------------------------------------------------------------------------------------------


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
