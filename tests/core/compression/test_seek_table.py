"""The seek table: what other tools read, and which foreign tables are refused."""

from __future__ import annotations

import io
import random
import shutil
import struct
import subprocess

import pytest
import zstandard
from compression_help import image_of, packed_file
from hypothesis import given
from hypothesis import strategies as st

from tierfall.core.compression.seek_table import (
    FOOTER_BYTES,
    FRAMES_MAX,
    FrameLength,
    read_footer,
    read_table,
    table_bytes,
    write_table,
)
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

TABLE = (FrameLength(100, 4096), FrameLength(7, 4096), FrameLength(5000, 17))
DATA = write_table(TABLE)
STORED_BYTES = 5107 + len(DATA)
lengths = st.builds(FrameLength, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1))


@given(st.lists(lengths, max_size=50))
def test_a_table_reads_back(table: list[FrameLength]) -> None:
    data = write_table(table)
    assert len(data) == table_bytes(len(table))
    stored_bytes = sum(entry.packed for entry in table) + len(data)
    assert read_table(data, stored_bytes=stored_bytes, what="x") == tuple(table)
    footer = data[-FOOTER_BYTES:]
    assert read_footer(footer, stored_bytes=stored_bytes, what="x") == len(data)


def test_the_bytes_are_those_of_the_format() -> None:
    assert write_table([FrameLength(1, 2), FrameLength(3, 4)]) == bytes.fromhex(
        "5e2a4d18 19000000 01000000 02000000 03000000 04000000 02000000 00 b1ea928f"
    )


def test_what_the_format_cannot_hold_is_refused() -> None:
    for entry in (FrameLength(1 << 32, 1), FrameLength(1, 1 << 32), FrameLength(-1, 1)):
        with pytest.raises(ValueError, match="does not fit"):
            write_table([entry])

    class Many(list[FrameLength]):
        def __len__(self) -> int:
            return FRAMES_MAX + 1

    with pytest.raises(ValueError, match="a seek table has at most"):
        write_table(Many())


def test_a_flipped_bit_is_damage_but_in_a_raw_length() -> None:
    for place in range(len(DATA) * 8):
        damaged = bytearray(DATA)
        damaged[place // 8] ^= 1 << place % 8
        if (place // 8 - 8) % 8 >= 4 and 8 <= place // 8 < len(DATA) - FOOTER_BYTES:
            continue  # the lengths of chunks are the manifest's: whoever knows it compares them
        with pytest.raises(IntegrityError, match="disk: it"):
            read_table(bytes(damaged), stored_bytes=STORED_BYTES, what="disk: it")


def test_cut_and_longer_tables_are_damage() -> None:
    for length in range(len(DATA)):
        for damaged in (DATA[:length], DATA[len(DATA) - length :]):
            with pytest.raises(IntegrityError):
                read_table(damaged, stored_bytes=STORED_BYTES, what="x")
    for damaged in (DATA + b"\0", b"\0" + DATA, DATA + DATA):
        with pytest.raises(IntegrityError):
            read_table(damaged, stored_bytes=STORED_BYTES, what="x")


@pytest.mark.parametrize("more", [-1, 1, 1 << 40])
def test_frames_that_do_not_fill_the_file_are_damage(more: int) -> None:
    with pytest.raises(IntegrityError, match="do not fill"):
        read_table(DATA, stored_bytes=STORED_BYTES + more, what="x")


@pytest.mark.parametrize(
    ("frames", "descriptor", "magic"),
    [
        (3, 0x80, 0x8F92EAB1),  # with checksums: not as we write it
        (3, 0x04, 0x8F92EAB1),
        (3, 0, 0x8F92EAB2),
        (FRAMES_MAX + 1, 0, 0x8F92EAB1),
        ((1 << 32) - 1, 0, 0x8F92EAB1),
        (FRAMES_MAX, 0, 0x8F92EAB1),  # longer than the file
        (2, 0, 0x8F92EAB1),
        (4, 0, 0x8F92EAB1),
    ],
)
def test_a_hostile_footer_is_damage(frames: int, descriptor: int, magic: int) -> None:
    damaged = DATA[:-FOOTER_BYTES] + struct.pack("<IBI", frames, descriptor, magic)
    with pytest.raises(IntegrityError):
        read_table(damaged, stored_bytes=STORED_BYTES, what="x")


@given(st.binary(max_size=100))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_table(data, stored_bytes=len(data), what="x")


RAW, MANIFEST = image_of({"complex128": 5008, "float32": 9000, "bfloat16": 8190, "bool": 77})


def test_a_stream_reader_gives_back_the_image() -> None:
    stored, packed = packed_file(RAW, MANIFEST, Codec.ZSTD)
    assert len(stored) == packed.stored_bytes
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(stored), read_across_frames=True)
    assert reader.read() == RAW


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no zstd command here")
def test_the_zstd_command_gives_back_the_image() -> None:
    stored, _ = packed_file(RAW, MANIFEST, Codec.ZSTD)
    for arguments, expected in ((["-dc"], RAW), (["-t"], b"")):
        done = subprocess.run(
            ["zstd", *arguments], input=stored, capture_output=True, timeout=60, check=True
        )
        assert done.stdout == expected


def test_a_stranger_reads_a_range_by_the_table_alone() -> None:
    stored, _ = packed_file(RAW, MANIFEST, Codec.ZSTD)
    length = read_footer(stored[-FOOTER_BYTES:], stored_bytes=len(stored), what="x")
    table = read_table(stored[-length:], stored_bytes=len(stored), what="x")
    assert [entry.raw for entry in table] == [
        end - start for start, end in map(MANIFEST.chunk_range, range(MANIFEST.chunk_count))
    ]
    chance = random.Random(8)
    for _ in range(50):
        start = chance.randrange(len(RAW))
        end = min(len(RAW), start + chance.randrange(9000))
        found, packed_at, raw_at = b"", 0, 0
        for entry in table:
            if raw_at < end and start < raw_at + entry.raw:
                part = zstandard.ZstdDecompressor().decompress(
                    stored[packed_at : packed_at + entry.packed]
                )
                found += part[max(0, start - raw_at) : end - raw_at]
            packed_at += entry.packed
            raw_at += entry.raw
        assert found == RAW[start:end]
