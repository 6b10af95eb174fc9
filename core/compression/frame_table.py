"""The record ``rank-....stored.json``: the frames of a packed image in its file.

The manifest beside it has the raw lengths and digests of the chunks, and is the same on every tier. The record is
validated against the manifest: a contradiction is damage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from json import loads
from typing import Any

from tierfall.core.compression.byte_planes import WIDTHS
from tierfall.core.compression.frames import LEVEL_MAX, LEVEL_MIN, frame_bytes_max
from tierfall.core.compression.seek_table import FrameLength, table_bytes, write_table
from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields, Spliced
from tierfall.core.format.records import IMAGE_BYTES_MAX, Geometry, Manifest
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

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
        table = table_bytes(self.chunk_count) if self.codec is Codec.ZSTD else 0
        return self.frames_bytes + table

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Start and end of the frame of chunk ``index`` in the file."""
        start = self.offsets[index]
        return start, start + self.lengths[index]

    def seek_table(self, manifest: Manifest) -> bytes:
        """The seek table after the frames; empty for ``planes``, since ``zstd -d`` cannot restore such an image."""
        if self.codec is not Codec.ZSTD:
            return b""
        return write_table(list(map(FrameLength, self.lengths, _raw_lengths(manifest))))

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
        reader = _piece(piece, f"{what}: pieces")
        start = reader.number("start", 0, IMAGE_BYTES_MAX)
        if reader.number("end", start, IMAGE_BYTES_MAX) == start:
            continue
        dtype = dtypes.from_name(reader.get("dtype", str))
        size = 1 if dtype is None else dtype.itemsize
        found.append((start, size if size in WIDTHS else 1))
    return found


def _piece(piece: Any, what: str) -> JsonFields:
    if not isinstance(piece, dict):
        raise IntegrityError(f"{what}: an entry is not an object")
    return JsonFields(piece, what)
