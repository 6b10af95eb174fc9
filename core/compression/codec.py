"""Packs chunks into zstd frames, and unpacks them.

Data moves from buffer to buffer without the GIL: zstandard's ``readinto`` compresses into the given buffer, and
decompresses a frame that ``check_frame`` accepted straight into its target. It holds the GIL only for a remainder below
128 KiB at the end of a chunk. ``ZstdCompressor.compress`` would release it there too, but returns new memory, whose
deallocation holds it for longer.

The codec ``planes`` groups the bytes of a chunk by their position in an item, so that zstd compresses exponents
separately: first all first bytes, then all second bytes and so on, then the remainder that is no whole item, unchanged.
NumPy copies on the calling thread and releases the GIL; torch would start threads of its own beside the training
loop's.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

WIDTHS = (1, 2, 4, 8, 16)
"""The item sizes of ``planes``."""


class Packer:
    """Compresses one chunk at a time. Not thread-safe: the compressor reuses its tables from chunk to chunk.

    ``scratch`` provides a buffer of the chunk's length for the codec ``planes`` with a width above 1.
    """

    def __init__(self, codec: Codec, *, level: int, scratch: BufferPool) -> None:
        self._codec = codec
        self._scratch = scratch
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True, write_dict_id=False
        )

    def pack(self, chunk: memoryview, target: memoryview, *, width: int = 1) -> int:
        """Write the frame of ``chunk`` to ``target`` and return its length.

        ``target`` has room for ``frame_bytes_max(len(chunk))``. ``width`` is the item size for ``planes``; ``zstd``
        ignores it.
        """
        if len(target) < frame_bytes_max(len(chunk)):
            raise ValueError(f"a target of {len(target)} bytes for a chunk of {len(chunk)}")
        if self._codec is Codec.ZSTD or width == 1:
            return self._compress(chunk, target)
        with self._scratch.lend_view(len(chunk)) as buffer:
            sorted_bytes = buffer[: len(chunk)]
            split_planes(chunk, sorted_bytes, width)
            return self._compress(sorted_bytes, target)

    def _compress(self, source: memoryview, target: memoryview) -> int:
        return self._compressor.stream_reader(source).readinto(target)


class Unpacker:
    """Decompresses one frame at a time. Not thread-safe; ``scratch`` as for the Packer."""

    def __init__(self, codec: Codec, *, scratch: BufferPool) -> None:
        self._codec = codec
        self._scratch = scratch
        self._decompressor = zstandard.ZstdDecompressor()

    def unpack(self, frame: memoryview, target: memoryview, *, width: int = 1, what: str) -> None:
        """Fill ``target``, of the length in the manifest, from the chunk's frame.

        IntegrityError, naming ``what``, if the frame is damaged or has another length; the content of ``target`` is
        undefined then. Allocates nothing beyond the scratch buffer, whatever the frame declares.
        """
        check_frame(frame, len(target), what=what)
        if self._codec is Codec.ZSTD or width == 1:
            self._decompress(frame, target, what)
            return
        with self._scratch.lend_view(len(target)) as buffer:
            sorted_bytes = buffer[: len(target)]
            self._decompress(frame, sorted_bytes, what)
            join_planes(sorted_bytes, target, width)

    def _decompress(self, frame: memoryview, target: memoryview, what: str) -> None:
        try:
            filled = self._decompressor.stream_reader(frame).readinto(target)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"{what}: damaged: {error}") from error
        if filled != len(target):
            raise IntegrityError(f"{what}: has {filled} bytes, {len(target)} by the manifest")


_Bytes = NDArray[np.uint8]


def split_planes(chunk: memoryview, target: memoryview, width: int) -> None:
    """Write the planes of ``chunk`` to ``target``, of the same length and without shared memory."""
    items, rest = _halves(chunk, width)
    planes, rest_target = _halves(target, width)
    for place, plane in enumerate(planes.reshape(width, -1)):
        np.copyto(plane, items[place::width])
    np.copyto(rest_target, rest)


def join_planes(planes: memoryview, target: memoryview, width: int) -> None:
    """The inverse of ``split_planes``."""
    sorted_items, rest = _halves(planes, width)
    items, rest_target = _halves(target, width)
    for place, plane in enumerate(sorted_items.reshape(width, -1)):
        np.copyto(items[place::width], plane)
    np.copyto(rest_target, rest)


def _halves(view: memoryview, width: int) -> tuple[_Bytes, _Bytes]:
    """The whole items, and the remainder."""
    flat = np.frombuffer(view, dtype=np.uint8)
    whole = len(flat) - len(flat) % width
    return flat[:whole], flat[whole:]


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
