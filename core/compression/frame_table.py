"""The record ``rank-....stored.json``: how the chunks of a packed image lie in its file.

It stands beside the manifest, which says what the chunks are once they are unpacked (raw lengths and digests) and is
the same on every tier. The record is read together with it: what does not fit the manifest is damage.
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
from tierfall.core.format.documents import Spliced
from tierfall.core.format.json_fields import JsonFields
from tierfall.core.format.records import IMAGE_BYTES_MAX, Geometry, Manifest
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import Codec

_PACKING = {codec.value: codec for codec in (Codec.ZSTD, Codec.PLANES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """Where the frame of each chunk of an image lies, and how it is unpacked.

    ``raw_bytes`` is the length of the image; ``widths`` are those of ``planes``, and all 1 for ``zstd``. The frames
    follow each other without holes; with ``zstd`` a seek table follows them.
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
        """All frames together: where the seek table begins, if there is one."""
        return self.offsets[-1] + self.lengths[-1]

    @property
    def stored_bytes(self) -> int:
        """The length of the file."""
        table = table_bytes(self.chunk_count) if self.codec is Codec.ZSTD else 0
        return self.frames_bytes + table

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return start and end of the frame of chunk ``index`` in the file."""
        start = self.offsets[index]
        return start, start + self.lengths[index]

    def seek_table(self, manifest: Manifest) -> bytes:
        """Return what follows the frames in the file; nothing with ``planes``, whose frames do not hold the image."""
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
    """Describe the file whose frames have these lengths, in the order of the manifest's chunks.

    ``widths`` are those that the chunks were packed with: ``chunk_widths``.
    """
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
    """Read the record of a packed image of this manifest from bytes that nobody vouches for."""
    reader = JsonFields(documents.open_sealed(data, what=what), what)
    codec = _PACKING.get(reader.get("codec", str))
    if codec is None:
        raise IntegrityError(f"{what}: a codec that packs nothing")
    level = reader.number("level", LEVEL_MIN, LEVEL_MAX)
    raw_bytes = reader.number("raw_bytes", 1, IMAGE_BYTES_MAX)
    if raw_bytes != manifest.image_bytes:
        raise IntegrityError(
            f"{what}: of an image of {raw_bytes} bytes, the manifest says {manifest.image_bytes}"
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


def chunk_widths(pieces: Spliced, cut: Geometry, *, what: str) -> tuple[int, ...]:
    """Return by which width ``planes`` sorts each chunk: the item size of the tensor that its first byte belongs to.

    ``pieces`` is the serialised table of tensor pieces, ``cut`` how the image is cut. The header has width 1, and so
    has whatever this torch has no dtype for: a width changes the ratio, never the bytes.
    """
    starts, sizes = [], []
    for start, size in sorted(_items(pieces, what)):
        starts.append(start)
        sizes.append(size)
    widths = [1]
    for index in range(1, cut.chunk_count):
        place = bisect_right(starts, cut.chunk_range(index)[0] - cut.data_start)
        widths.append(sizes[place - 1] if place else 1)
    return tuple(widths)


def _items(pieces: Spliced, what: str) -> list[tuple[int, int]]:
    """List start and item size of every tensor that has bytes."""
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
