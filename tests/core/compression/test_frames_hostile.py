"""Untrusted frames: the right bytes or IntegrityError, and no large allocation."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
import zstandard
from compression_help import CODECS, like_floats, pack, scratch, unpack
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.compression.codec import Unpacker
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

RAW = like_floats(300_000, width=4)
MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES = 128 << 10


def refuse(frame: bytes, raw_bytes: int, codec: Codec = Codec.ZSTD) -> None:
    """See the frame refused, with little memory taken."""
    target = memoryview(bytearray(raw_bytes))
    unpacker = Unpacker(codec, scratch=scratch())
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="disk: chunk 3"):
            unpacker.unpack(memoryview(frame), target, width=4, what="disk: chunk 3")
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert (
        unpacker._decompressor.memory_size() < 1 << 20
    )  # zstd's own memory, which Python does not see


def frame_of(blocks: bytes, *, declared: int, window: bool = False) -> bytes:
    """Write a frame by hand: 8 bytes of content size; a single segment, or a window of 2 GiB."""
    descriptor = b"\xc0\xa8" if window else b"\xe0"
    return MAGIC + descriptor + struct.pack("<Q", declared) + blocks


def run_of(byte: bytes, length: int, *, last: bool = False) -> bytes:
    """Write a block that says a byte ``length`` times."""
    return (length << 3 | 1 << 1 | last).to_bytes(3, "little") + byte


@pytest.mark.parametrize("codec", CODECS)
def test_a_truncated_frame_is_damage(codec: Codec) -> None:
    frame = pack(codec, RAW, width=4)
    chance = random.Random(2)
    for cut in (0, 1, 4, 5, 9, 12, len(frame) - 1, len(frame) - 4, len(frame) - 5):
        refuse(frame[:cut], len(RAW), codec)
    for _ in range(50):
        refuse(frame[: chance.randrange(len(frame))], len(RAW), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_is_found_or_changes_nothing(codec: Codec) -> None:
    frame = pack(codec, RAW, width=4)
    chance, found = random.Random(4), 0
    places = [*range(20 * 8), *(chance.randrange(len(frame) * 8) for _ in range(150))]
    for place in places:
        damaged = bytearray(frame)
        damaged[place // 8] ^= 1 << place % 8
        try:
            assert unpack(codec, bytes(damaged), len(RAW), width=4) == RAW
        except IntegrityError:
            found += 1
    assert found > len(places) - 20


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("raw_bytes", [1, 299_999, 300_001, 1 << 20])
def test_a_frame_of_another_length_is_damage(codec: Codec, raw_bytes: int) -> None:
    refuse(pack(codec, RAW, width=4), raw_bytes, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_more_bytes_behind_the_frame_are_damage(codec: Codec) -> None:
    frame = pack(codec, RAW, width=4)
    for more in (b"\0", frame, b"\x5e\x2a\x4d\x18\0\0\0\0", pack(codec, b"x")):
        refuse(frame + more, len(RAW), codec)


def test_a_frame_that_does_not_state_its_length_is_damage() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
    refuse(frame, len(RAW))


def test_a_skippable_frame_is_damage() -> None:
    for number in range(16):
        magic = struct.pack("<I", 0x184D2A50 + number)
        refuse(magic + struct.pack("<I", 100) + bytes(100), 100)


def test_a_frame_with_a_dictionary_is_damage() -> None:
    # Descriptor: content size of 8 bytes, single segment, dictionary id of one byte.
    blocks = run_of(b"a", 100, last=True)
    refuse(MAGIC + b"\xe1\x07" + struct.pack("<Q", 100) + blocks, 100)


@pytest.mark.parametrize("window", [False, True])
def test_a_bomb_that_declares_its_length_is_refused_unread(window: bool) -> None:
    blocks = run_of(b"a", BLOCK_BYTES) * 8191 + run_of(b"a", BLOCK_BYTES, last=True)
    refuse(frame_of(blocks, declared=1 << 30, window=window), 100_000)
    refuse(frame_of(blocks, declared=(1 << 64) - 1, window=window), 100_000)
    refuse(frame_of(blocks, declared=(1 << 64) - 2, window=window), 100_000)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("window", [False, True])
def test_a_bomb_that_declares_less_than_it_holds_is_stopped(codec: Codec, window: bool) -> None:
    blocks = run_of(b"a", BLOCK_BYTES) * 8191 + run_of(b"a", BLOCK_BYTES, last=True)
    for declared in (1, BLOCK_BYTES):
        refuse(frame_of(blocks, declared=declared, window=window), declared, codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("window", [False, True])
def test_a_frame_that_holds_less_than_it_declares_is_damage(codec: Codec, window: bool) -> None:
    for declared in (101, BLOCK_BYTES, 300_000):
        blocks = run_of(b"a", 100, last=True)
        refuse(frame_of(blocks, declared=declared, window=window), declared, codec)


def test_a_block_without_end_is_damage() -> None:
    refuse(frame_of(run_of(b"a", 100), declared=100), 100)
    refuse(frame_of((7 << 3 | 3 << 1 | 1).to_bytes(3, "little") + bytes(7), declared=7), 7)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 5000))
def test_any_bytes_are_refused_or_read(data: bytes, raw_bytes: int) -> None:
    for frame in (data, MAGIC + data, frame_of(data, declared=raw_bytes)):
        for codec in CODECS:
            try:
                assert len(unpack(codec, frame, raw_bytes, width=4)) == raw_bytes
            except IntegrityError as error:
                assert "disk: chunk 3" in str(error)  # noqa: PT017


def test_nothing_is_written_beyond_the_target() -> None:
    around = bytearray(b"!" * 300)
    blocks = run_of(b"a", BLOCK_BYTES) * 3 + run_of(b"a", BLOCK_BYTES, last=True)
    with pytest.raises(IntegrityError):
        Unpacker(Codec.ZSTD, scratch=scratch()).unpack(
            memoryview(frame_of(blocks, declared=100)), memoryview(around)[100:200], what="x"
        )
    assert around[:100] == around[200:] == b"!" * 100
