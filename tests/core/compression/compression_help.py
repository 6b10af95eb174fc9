"""Buffers, data and a whole packed file for the tests of packing."""

from __future__ import annotations

import random

import xxhash

from tierfall.core.compression.codec import Packer, Unpacker, frame_bytes_max
from tierfall.core.compression.frame_table import FrameTable, chunk_widths, make_frame_table
from tierfall.core.format import documents
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Geometry, Lineage, Manifest
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.values import CheckpointId, Codec, Shard

CODECS = (Codec.ZSTD, Codec.PLANES)


def scratch(length: int = 1 << 20) -> BufferPool:
    return BufferPool(bytes=length, count=1)


def packer(codec: Codec, level: int = 1) -> Packer:
    return Packer(codec, level=level, scratch=scratch())


def unpacker(codec: Codec) -> Unpacker:
    return Unpacker(codec, scratch=scratch())


def pack(codec: Codec, raw: bytes, *, width: int = 1, level: int = 1) -> bytes:
    target = memoryview(bytearray(frame_bytes_max(len(raw))))
    length = packer(codec, level).pack(memoryview(raw), target, width=width)
    return bytes(target[:length])


def unpack(codec: Codec, frame: bytes, raw_bytes: int, *, width: int = 1) -> bytes:
    target = bytearray(raw_bytes)
    unpacker(codec).unpack(memoryview(frame), memoryview(target), width=width, what="disk: chunk 3")
    return bytes(target)


def like_floats(length: int, *, width: int = 2, seed: int = 5) -> bytes:
    """Make items whose last byte takes few values, as the exponents of a tensor do."""
    chance = random.Random(seed)
    data = bytearray(chance.randbytes(length))
    data[width - 1 :: width] = chance.choices(b"\x3b\x3c\x3d\xbc", k=len(data[width - 1 :: width]))
    return bytes(data)


def image_of(
    dtypes: dict[str, int], *, header_bytes: int = 8192, chunk_bytes: int = 4096
) -> tuple[bytes, Manifest]:
    """Make an image of tensors of these dtypes and lengths in bytes, and its manifest."""
    data, pieces = b"", []
    for name, length in dtypes.items():
        start, end = len(data), len(data) + length
        data += like_floats(length, width=4, seed=start)
        pieces.append({"name": name, "dtype": name, "start": start, "end": end})
    raw = b"{}".ljust(header_bytes) + data
    cut = Geometry(image_bytes=len(raw), data_start=header_bytes, chunk_bytes=chunk_bytes)
    chunks = [raw[slice(*cut.chunk_range(i))] for i in range(cut.chunk_count)]
    manifest = Manifest(
        lineage=Lineage(
            run="gpt",
            checkpoint=CheckpointId(400, 7),
            attempt_id="0f" * 16,
            ordinal=1,
            started_from=None,
        ),
        shard=Shard(0, 1),
        image_bytes=len(raw),
        data_start=header_bytes,
        chunk_bytes=chunk_bytes,
        digests=tuple(f"xxh3-128:{xxhash.xxh3_128_hexdigest(chunk)}" for chunk in chunks),
        structure="a-structure",
        pieces=Spliced(documents.dumps(pieces)),
    )
    return raw, manifest


def packed_file(raw: bytes, manifest: Manifest, codec: Codec) -> tuple[bytes, FrameTable]:
    """Pack an image chunk by chunk, as a flush does."""
    widths = chunk_widths(manifest.pieces, manifest, what="x")
    frames = [
        pack(codec, raw[slice(*manifest.chunk_range(index))], width=width)
        for index, width in enumerate(widths)
    ]
    packed = make_frame_table(
        manifest, codec, level=1, lengths=[len(frame) for frame in frames], widths=widths
    )
    return b"".join(frames) + packed.seek_table(manifest), packed
