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

from tierfall.core.compression.frames import check_frame, frame_bytes_max
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
