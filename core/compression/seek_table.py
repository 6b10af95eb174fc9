"""The seek table of the zstd seekable format: where each frame of a file begins, as a skippable last frame.

So ``zstd -d`` gives back the whole image, and whoever knows the format reads a range of it alone. All numbers are
little endian (zstd, contrib/seekable_format/zstd_seekable_compression_format.md):

    0x184D2A5E   length of what follows   per frame: packed length, raw length   frames   descriptor 0   0x8F92EAB1
    4 bytes      4 bytes                  4 bytes each                           4 bytes  1 byte         4 bytes

tierfall writes no checksums into it: the frames have their own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tierfall.core.types.errors import IntegrityError

FRAMES_MAX = 0x8000000
FOOTER_BYTES = 9

_SKIPPABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1
_HEADER = struct.Struct("<II")
_ENTRY_BYTES = 8
_FOOTER = struct.Struct("<IBI")


class FrameLength(NamedTuple):
    """How long one frame is in the file, and how long what it holds."""

    packed: int
    raw: int


def table_bytes(frames: int) -> int:
    """Return how long the table of that many frames is."""
    return _HEADER.size + _ENTRY_BYTES * frames + FOOTER_BYTES


def write_table(lengths: Sequence[FrameLength]) -> bytes:
    """Write the table of a file's frames, in their order; ValueError where the format cannot hold them."""
    if len(lengths) > FRAMES_MAX:
        raise ValueError(f"{len(lengths)} frames; a seek table holds {FRAMES_MAX}")
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


def read_footer(footer: bytes, *, stored_bytes: int, what: str) -> int:
    """Return how long the table is that ends in these ``FOOTER_BYTES`` bytes, in a file of ``stored_bytes``."""
    if len(footer) != FOOTER_BYTES:
        raise IntegrityError(f"{what}: too short for a seek table")
    frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != _SEEKABLE_MAGIC or descriptor or frames > FRAMES_MAX:
        raise IntegrityError(f"{what}: does not end in a seek table as tierfall writes it")
    if table_bytes(frames) > stored_bytes:
        raise IntegrityError(f"{what}: its seek table is longer than the file")
    return table_bytes(frames)


def read_table(data: bytes, *, stored_bytes: int, what: str) -> tuple[FrameLength, ...]:
    """Read the table from the last bytes of a file of ``stored_bytes``, which the frames and the table fill."""
    length = read_footer(data[-FOOTER_BYTES:], stored_bytes=stored_bytes, what=what)
    if len(data) != length or _HEADER.unpack_from(data) != (
        _SKIPPABLE_MAGIC,
        length - _HEADER.size,
    ):
        raise IntegrityError(f"{what}: its seek table is damaged or cut short")
    entries = data[_HEADER.size : -FOOTER_BYTES]
    table = tuple(map(FrameLength._make, struct.iter_unpack("<II", entries)))
    if sum(entry.packed for entry in table) + length != stored_bytes:
        raise IntegrityError(f"{what}: the frames of its seek table do not fill the file")
    return table
