"""The record ``rank-....stored.json``: the frames of a packed image in its file.

The manifest beside it has the raw lengths and digests of the chunks, and is the same on every tier. The record is
validated against the manifest: a contradiction is damage.

A file of zstd frames ends in a skippable frame with the seek table of the zstd seekable format: ``zstd -d`` restores
the whole image, and tools for that format read ranges of it. All numbers are little endian (zstd,
contrib/seekable_format/zstd_seekable_compression_format.md); the frames have checksums of their own:

    0x184D2A5E   length of what follows   per frame: packed length, raw length   frames   descriptor 0   0x8F92EAB1
    4 bytes      4 bytes                  4 bytes each                           4 bytes  1 byte         4 bytes
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from json import loads

from tierfall.core.compression.codec import LEVEL_MAX, LEVEL_MIN, WIDTHS, frame_bytes_max
from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields, Spliced
from tierfall.core.format.records import IMAGE_BYTES_MAX, Geometry, Manifest
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

_PAIR = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER = struct.Struct("<IBI")
_SEEKABLE_MAGIC = 0x8F92EAB1
_PACKING = {codec.value: codec for codec in (Codec.ZSTD, Codec.PLANES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """Offset and length of each chunk's frame in the file, and how to unpack it.

    ``raw_bytes`` is the length of the image; ``widths`` are those of ``planes``, and all 1 for ``zstd``. The frames
    have no gaps; with ``zstd`` a seek table follows them.
    """

    codec: Codec
    level: int
    raw_bytes: int
    offsets: tuple[int, ...] = field(repr=False)
    lengths: tuple[int, ...] = field(repr=False)
    widths: tuple[int, ...] = field(repr=False)

    @property
    def chunk_count(self) -> int:
        return len(self.lengths)

    @property
    def frames_bytes(self) -> int:
        """Size of all frames, which is the offset of the seek table, if there is one."""
        return self.offsets[-1] + self.lengths[-1]

    @property
    def stored_bytes(self) -> int:
        """Size of the file."""
        table = seek_table_bytes(self.chunk_count) if self.codec is Codec.ZSTD else 0
        return self.frames_bytes + table

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Start and end of the frame of chunk ``index`` in the file."""
        start = self.offsets[index]
        return start, start + self.lengths[index]

    def seek_table(self, manifest: Manifest) -> bytes:
        """The seek table after the frames; empty for ``planes``, since ``zstd -d`` cannot restore such an image."""
        if self.codec is not Codec.ZSTD:
            return b""
        return write_seek_table(self.lengths, _raw_lengths(manifest))

    def encode(self) -> bytes:
        members: dict[str, object] = {
            "codec": self.codec.value,
            "level": self.level,
            "raw_bytes": self.raw_bytes,
            "offsets": list(self.offsets),
            "lengths": list(self.lengths),
        }
        if self.codec is Codec.PLANES:
            members["widths"] = list(self.widths)
        return documents.seal(members)


def seek_table_bytes(frames: int) -> int:
    """Size of the seek table of that many frames."""
    return _PAIR.size + 8 * frames + _FOOTER.size


def write_seek_table(packed: Sequence[int], raw: Sequence[int]) -> bytes:
    """Encode the seek table of frames by their lengths in the file, and those of their content."""
    entries = b"".join(map(_PAIR.pack, packed, raw))
    footer = _FOOTER.pack(len(packed), 0, _SEEKABLE_MAGIC)
    return _PAIR.pack(_SKIPPABLE_MAGIC, len(entries) + len(footer)) + entries + footer


def make_frame_table(
    manifest: Manifest, codec: Codec, *, level: int, lengths: Sequence[int], widths: Sequence[int]
) -> FrameTable:
    """Describe a file by its frames' lengths and the ``chunk_widths`` used, in the order of the manifest's chunks."""
    if not len(lengths) == len(widths) == manifest.chunk_count:
        raise ValueError(f"{len(lengths)} frames and {len(widths)} widths for {manifest!r}")
    return FrameTable(
        codec=codec,
        level=level,
        raw_bytes=manifest.image_bytes,
        offsets=(0, *accumulate(lengths[:-1])),
        lengths=tuple(lengths),
        widths=tuple(widths) if codec is Codec.PLANES else (1,) * len(widths),
    )


def read_frame_table(data: bytes, manifest: Manifest, *, what: str) -> FrameTable:
    """Parse the record of a packed image from untrusted bytes, and validate it against the manifest."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    codec = _PACKING.get(reader.get("codec", str))
    if codec is None:
        raise IntegrityError(f"{what}: a codec that packs nothing")
    level = reader.number("level", LEVEL_MIN, LEVEL_MAX)
    raw_bytes = reader.number("raw_bytes", 1, IMAGE_BYTES_MAX)
    if raw_bytes != manifest.image_bytes:
        raise IntegrityError(
            f"{what}: of an image of {raw_bytes} bytes, {manifest.image_bytes} by the manifest"
        )
    lengths = _numbers(reader, "lengths", manifest, what)
    for length, raw in zip(lengths, _raw_lengths(manifest), strict=True):
        if not 0 < length <= frame_bytes_max(raw):
            raise IntegrityError(f"{what}: no frame of a chunk of {raw} bytes has {length} bytes")
    offsets = _numbers(reader, "offsets", manifest, what)
    if offsets != [0, *accumulate(lengths[:-1])]:
        raise IntegrityError(f"{what}: its frames overlap, or leave holes")
    widths = [1] * len(lengths)
    if codec is Codec.PLANES:
        widths = _numbers(reader, "widths", manifest, what)
    if not set(widths) <= set(WIDTHS):
        raise IntegrityError(f"{what}: a plane width is none of {WIDTHS}")
    return FrameTable(
        codec=codec,
        level=level,
        raw_bytes=raw_bytes,
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        widths=tuple(widths),
    )


def _numbers(reader: JsonFields, name: str, manifest: Manifest, what: str) -> list[int]:
    numbers = reader.list_of(name, int)
    if len(numbers) != manifest.chunk_count:
        raise IntegrityError(
            f"{what}: {name!r} is of {len(numbers)} chunks, the manifest has {manifest.chunk_count}"
        )
    return numbers


def _raw_lengths(manifest: Manifest) -> list[int]:
    ranges = map(manifest.chunk_range, range(manifest.chunk_count))
    return [end - start for start, end in ranges]


def chunk_widths(pieces: Spliced, geometry: Geometry, *, what: str) -> tuple[int, ...]:
    """The width for ``planes`` of each chunk: the item size of the tensor that its first byte belongs to.

    ``pieces`` is the serialised table of tensor blocks. The header has width 1, and so have tensors whose dtype this
    torch lacks: a width affects the compression ratio, never the bytes.
    """
    starts, sizes = [], []
    for start, size in sorted(_items(pieces, what)):
        starts.append(start)
        sizes.append(size)
    widths = [1]
    for index in range(1, geometry.chunk_count):
        after = bisect_right(starts, geometry.chunk_range(index)[0] - geometry.data_start)
        widths.append(sizes[after - 1] if after else 1)
    return tuple(widths)


def _items(pieces: Spliced, what: str) -> list[tuple[int, int]]:
    """Start and item size of every non-empty tensor block."""
    found = []
    for piece in loads(pieces):
        if not isinstance(piece, dict):
            raise IntegrityError(f"{what}: pieces: an entry is not an object")
        reader = JsonFields(piece, f"{what}: pieces")
        start = reader.number("start", 0, IMAGE_BYTES_MAX)
        if reader.number("end", start, IMAGE_BYTES_MAX) == start:
            continue
        dtype = dtypes.from_name(reader.get("dtype", str))
        size = 1 if dtype is None else dtype.itemsize
        found.append((start, size if size in WIDTHS else 1))
    return found
