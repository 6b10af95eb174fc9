"""Chunks round-trip through their frames, for every codec, item size and length."""

from __future__ import annotations

import random

import pytest
from compression_help import CODECS, like_floats, pack, packer, unpack, unpacker

from tierfall.core.compression.codec import (
    WIDTHS,
    Packer,
    Unpacker,
    frame_bytes_max,
)
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

BLOCK_BYTES = 128 << 10


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_length_comes_back(codec: Codec, width: int) -> None:
    for length in (1, 15, 16, 17, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7):
        floats, noise = like_floats(length, width=4), random.Random(7).randbytes(length)
        for raw in (floats, noise, bytes(length)):
            frame = pack(codec, raw, width=width)
            assert len(frame) <= frame_bytes_max(length)
            assert unpack(codec, frame, length, width=width) == raw


def test_one_packer_takes_chunk_after_chunk_and_a_failure_between() -> None:
    chance = random.Random(3)
    into, out_of = packer(Codec.PLANES), unpacker(Codec.PLANES)
    target = memoryview(bytearray(frame_bytes_max(1 << 20)))
    back = memoryview(bytearray(1 << 20))
    for _ in range(30):
        raw = like_floats(chance.randrange(1, 1 << 20), width=4, seed=chance.randrange(99))
        width = chance.choice(WIDTHS)
        length = into.pack(memoryview(raw), target, width=width)
        with pytest.raises(ValueError, match="a target of"):
            into.pack(memoryview(raw), target[: len(raw)], width=width)
        damaged = bytearray(target[:length])
        damaged[-1] ^= 1
        with pytest.raises(IntegrityError, match="damaged"):
            out_of.unpack(memoryview(damaged), back[: len(raw)], width=width, what="x")
        out_of.unpack(target[:length], back[: len(raw)], width=width, what="x")
        assert back[: len(raw)] == raw


def test_a_pool_with_smaller_buffers_serves_a_larger_chunk() -> None:
    raw = like_floats(50_000, width=8)
    small = BufferPool(bytes=4096, count=1)
    target = memoryview(bytearray(frame_bytes_max(len(raw))))
    length = Packer(Codec.PLANES, level=3, scratch=small).pack(memoryview(raw), target, width=8)
    back = bytearray(len(raw))
    out_of = Unpacker(Codec.PLANES, scratch=small)
    out_of.unpack(target[:length], memoryview(back), width=8, what="x")
    assert back == raw
