"""Packs chunks into zstd frames, and unpacks them.

Payloads go from buffer to buffer without the interpreter lock: zstandard's ``readinto`` compresses into the buffer that
it is given, and decompresses a frame that ``check_frame`` passed straight into its target. What the lock is held for is
the last part of a chunk, below 128 KiB, where its length is no multiple of that. ``ZstdCompressor.compress`` would
release it there too, but returns fresh memory, whose freeing holds it for longer.

Neither class knows tiers, files or records.
"""

from __future__ import annotations

import zstandard

from tierfall.core.compression import byte_planes
from tierfall.core.compression.frames import LEVEL_MAX, LEVEL_MIN, check_frame, frame_bytes_max
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.core.types.values import Codec


class Packer:
    """Compresses one chunk at a time. One thread of use: its compressor keeps tables from chunk to chunk.

    ``scratch`` lends a buffer as long as the chunk to the codec ``planes``, where the width is above 1.
    """

    def __init__(self, codec: Codec, *, level: int, scratch: BufferPool) -> None:
        if codec is Codec.NONE:
            raise ConfigError("compress: codec none stores chunks as they are")
        if not LEVEL_MIN <= level <= LEVEL_MAX:
            raise ConfigError(f"compress: level {level} is not within {LEVEL_MIN} to {LEVEL_MAX}")
        self._codec = codec
        self._scratch = scratch
        self._compressor = zstandard.ZstdCompressor(
            level=level, write_checksum=True, write_content_size=True, write_dict_id=False
        )

    def pack(self, chunk: memoryview, target: memoryview, *, width: int = 1) -> int:
        """Fill ``target`` with the frame of ``chunk`` and return its length.

        ``target`` has room for ``frame_bytes_max(len(chunk))``. ``width`` is the item size by which ``planes`` sorts;
        ``zstd`` takes no notice of it.
        """
        if len(target) < frame_bytes_max(len(chunk)):
            raise ValueError(f"a target of {len(target)} bytes for a chunk of {len(chunk)}")
        if self._codec is Codec.ZSTD or width == 1:
            return self._compress(chunk, target)
        with self._scratch.take(len(chunk)) as buffer:
            sorted_bytes = buffer[: len(chunk)]
            byte_planes.split(chunk, sorted_bytes, width)
            return self._compress(sorted_bytes, target)

    def _compress(self, source: memoryview, target: memoryview) -> int:
        return self._compressor.stream_reader(source).readinto(target)


class Unpacker:
    """Decompresses one frame at a time. One thread of use; ``scratch`` is as for the Packer."""

    def __init__(self, codec: Codec, *, scratch: BufferPool) -> None:
        if codec is Codec.NONE:
            raise ConfigError("compress: codec none stores chunks as they are")
        self._codec = codec
        self._scratch = scratch
        self._decompressor = zstandard.ZstdDecompressor()

    def unpack(self, frame: memoryview, target: memoryview, *, width: int = 1, what: str) -> None:
        """Fill ``target``, which has the length that the manifest says, from the chunk's frame.

        Raises IntegrityError, naming ``what``, where the frame is damaged or holds another length; nothing is
        allocated beyond the scratch buffer, whatever the frame declares. What ``target`` holds then is undefined.
        """
        check_frame(frame, len(target), what=what)
        if self._codec is Codec.ZSTD or width == 1:
            self._decompress(frame, target, what)
            return
        with self._scratch.take(len(target)) as buffer:
            sorted_bytes = buffer[: len(target)]
            self._decompress(frame, sorted_bytes, what)
            byte_planes.join(sorted_bytes, target, width)

    def _decompress(self, frame: memoryview, target: memoryview, what: str) -> None:
        try:
            filled = self._decompressor.stream_reader(frame).readinto(target)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"{what}: damaged: {error}") from error
        if filled != len(target):
            raise IntegrityError(f"{what}: holds {filled} bytes, the manifest says {len(target)}")
