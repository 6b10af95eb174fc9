"""The seek table: other tools of the format read it."""

from __future__ import annotations

import random
import struct

import zstandard
from compression_help import image_of, packed_file

from tierfall.core.compression.frame_table import seek_table_bytes
from tierfall.core.types.values import Codec

RAW, MANIFEST = image_of({"complex128": 5008, "float32": 9000, "bfloat16": 8190, "bool": 77})


def test_a_stranger_reads_a_range_by_the_table_alone() -> None:
    stored, _ = packed_file(RAW, MANIFEST, Codec.ZSTD)
    frames, _, _ = struct.unpack("<IBI", stored[-9:])
    entries = stored[-seek_table_bytes(frames) + 8 : -9]
    table = list(struct.iter_unpack("<II", entries))
    assert [raw for _, raw in table] == [
        end - start for start, end in map(MANIFEST.chunk_range, range(MANIFEST.chunk_count))
    ]
    chance = random.Random(8)
    for _ in range(50):
        start = chance.randrange(len(RAW))
        end = min(len(RAW), start + chance.randrange(9000))
        found, packed_at, raw_at = b"", 0, 0
        for packed, raw in table:
            if raw_at < end and start < raw_at + raw:
                frame = stored[packed_at : packed_at + packed]
                part = zstandard.ZstdDecompressor().decompress(frame)
                found += part[max(0, start - raw_at) : end - raw_at]
            packed_at += packed
            raw_at += raw
        assert found == RAW[start:end]
