"""Validation of zstd frames (RFC 8878, section 3.1.1) before decompression.

A chunk is stored as one frame that declares its content size. The decompressor writes such a frame straight into the
target, in one call and without allocating, only if the frame is complete and declares the size in the manifest.
``check_frame`` ensures that, from the headers of the frame and its blocks.
"""

from __future__ import annotations

import zstandard

from tierfall.core.types.errors import IntegrityError

LEVEL_MIN, LEVEL_MAX = 1, 19

_MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER_BYTES_MAX = 18
_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_BLOCK_RLE, _BLOCK_RESERVED = 1, 3
_SMALL_BYTES = 128 << 10


def frame_bytes_max(raw_bytes: int) -> int:
    """The maximum size of the frame of ``raw_bytes`` bytes (ZSTD_COMPRESSBOUND in zstd.h)."""
    return raw_bytes + (raw_bytes >> 8) + (max(0, _SMALL_BYTES - raw_bytes) >> 11)


def check_frame(frame: memoryview, raw_bytes: int, *, what: str) -> None:
    """Raise IntegrityError unless ``frame`` is exactly one complete frame that declares ``raw_bytes`` bytes."""
    start = bytes(frame[:_HEADER_BYTES_MAX])
    try:
        header = zstandard.get_frame_parameters(start)
        position = zstandard.frame_header_size(start)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: not a zstd frame: {error}") from error
    if not start.startswith(_MAGIC) or header.dict_id:
        raise IntegrityError(f"{what}: a zstd frame of a kind that tierfall does not write")
    if header.content_size != raw_bytes:
        raise IntegrityError(
            f"{what}: its zstd frame does not declare the {raw_bytes} bytes of the manifest"
        )
    end = _end_of_blocks(frame, position, what) + _CHECKSUM_BYTES * header.has_checksum
    if end != len(frame):
        raise IntegrityError(f"{what}: its zstd frame has {end} bytes, {len(frame)} are stored")


def _end_of_blocks(frame: memoryview, position: int, what: str) -> int:
    last = False
    while not last:
        header = int.from_bytes(frame[position : position + _BLOCK_HEADER_BYTES], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        position += _BLOCK_HEADER_BYTES + (1 if kind == _BLOCK_RLE else size)
        if position > len(frame) or kind == _BLOCK_RESERVED:
            raise IntegrityError(f"{what}: its zstd frame is damaged or cut short")
    return position
