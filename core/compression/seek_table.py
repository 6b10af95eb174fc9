"""The seek table of the zstd seekable format: the lengths of a file's frames, in a skippable frame at its end.

With it, ``zstd -d`` restores the whole image, and tools for the seekable format read ranges of it. All numbers are
little endian (zstd, contrib/seekable_format/zstd_seekable_compression_format.md):

    0x184D2A5E   length of what follows   per frame: packed length, raw length   frames   descriptor 0   0x8F92EAB1
    4 bytes      4 bytes                  4 bytes each                           4 bytes  1 byte         4 bytes

tierfall's seek tables have no checksums: the frames have their own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

FRAMES_MAX = 0x8000000
FOOTER_BYTES = 9

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_HEADER = struct.Struct("<II")
_ENTRY_BYTES = 8
_FOOTER = struct.Struct("<IBI")


class FrameLength(NamedTuple):
    """Size of one frame in the file, and of its content."""

    packed: int
    raw: int


def table_bytes(frames: int) -> int:
    """Size of the table of that many frames."""
    return _HEADER.size + _ENTRY_BYTES * frames + FOOTER_BYTES


def write_table(lengths: Sequence[FrameLength]) -> bytes:
    """Encode the table of a file's frames, in their order; ValueError if they exceed the format's limits."""
    if len(lengths) > FRAMES_MAX:
        raise ValueError(f"{len(lengths)} frames; a seek table has at most {FRAMES_MAX}")
    numbers = [number for entry in lengths for number in entry]
    try:
        entries = struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error as error:
        raise ValueError(f"a frame's length does not fit a seek table: {error}") from error
    return b"".join(
        (
            _HEADER.pack(_SKIPPABLE_MAGIC, len(entries) + FOOTER_BYTES),
            entries,
            _FOOTER.pack(len(lengths), 0, _SEEKABLE_MAGIC),
        )
    )
