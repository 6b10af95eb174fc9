"""Reading the merged index: integers stay in arrays, and objects are created for one tensor at a time.

    index.zst    one zstd frame of:
    8 bytes      length of the head, little-endian
    head         a document (``documents``): world_size; tensors, each name, dtype, whole shape, number of blocks;
                 the width of each column; the digest of all columns
    columns      rank and start of each block; offsets, then lengths, of each tensor dimension by dimension

Each section begins at a multiple of 8 bytes. The end of a block follows from its dtype and lengths. The bytes are
untrusted: allocations are bounded, and a defect is an IntegrityError; that of a block is raised on access to its
tensor.

Columns are delta-encoded, in the narrowest width that the largest value allows. Differences are modulo the width, so
that they need no more bytes than values, and are decoded in place. The blocks of one tensor differ from rank to rank by
constant steps, which zstd compresses to almost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray

from tierfall.core.compression.frames import check_frame
from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.format.records import DIGEST_PREFIX, HEADER_BYTES_MAX, IMAGE_BYTES_MAX
from tierfall.core.image.merge import TensorBlock
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import IntegrityError, NotSupportedError

Column = NDArray[Any]
ALIGNMENT_BYTES = 8
WIDTHS = (1, 2, 4, 8)
INDEX_BYTES_MAX = 512 << 20
"""Maximum size of an index, unpacked: about twenty million blocks."""
LENGTH_BYTES = 8
COLUMNS = ("rank", "start", "offset", "lengths")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTensor:
    """A tensor of a checkpoint and its blocks in the ranks' images, including all replicas of a block. Byte ranges are
    relative to the start of an image's data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[TensorBlock, ...]


@dataclass(frozen=True, slots=True)
class _IndexEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: int


class Index:
    """All tensors of a checkpoint. Blocks remain in arrays until their tensor is accessed."""

    def __init__(
        self, what: str, world_size: int, entries: Sequence[_IndexEntry], columns: dict[str, Column]
    ) -> None:
        self._what = what
        self.world_size = world_size
        self._entries = entries
        self._columns = columns
        self._first = [0, *accumulate(entry.blocks for entry in entries)]
        self._coordinates = [0, *accumulate(e.blocks * len(e.shape) for e in entries)]
        self._numbers: dict[str, list[int]] = {}
        for number, entry in enumerate(entries):
            self._numbers.setdefault(entry.name, []).append(number)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[IndexedTensor]:
        return map(self._tensor, range(len(self._entries)))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(self._numbers)

    @property
    def block_count(self) -> int:
        return self._first[-1]

    def find(self, name: str) -> tuple[IndexedTensor, ...]:
        """The tensors of a name: several if ranks have different ones, none if the name is unknown.

        IntegrityError for an impossible block, NotSupportedError if this torch lacks the dtype.
        """
        return tuple(self._tensor(number) for number in self._numbers.get(name, ()))

    def kinds(self, name: str) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Dtype and whole shape of the tensors of a name, without their blocks; raises as ``find`` does."""
        entries = [self._entries[number] for number in self._numbers.get(name, ())]
        return tuple((self._dtype(entry), entry.shape) for entry in entries)

    def _dtype(self, entry: _IndexEntry) -> torch.dtype:
        dtype = dtypes.from_name(entry.dtype)
        if dtype is None:
            raise NotSupportedError(
                f"{self._what}: tensor {entry.name!r} is of dtype {entry.dtype!r:.60}, unknown to torch "
                f"{torch.__version__}"
            )
        return dtype

    def _tensor(self, number: int) -> IndexedTensor:
        entry = self._entries[number]
        dtype = self._dtype(entry)
        first, stop = self._first[number], self._first[number + 1]
        ranks = self._columns["rank"][first:stop].tolist()
        starts = self._columns["start"][first:stop].tolist()
        offsets, lengths = self._rows("offset", number), self._rows("lengths", number)
        blocks = tuple(
            self._block(entry, dtype, *block)
            for block in zip(ranks, starts, offsets, lengths, strict=True)
        )
        return IndexedTensor(name=entry.name, dtype=dtype, shape=entry.shape, blocks=blocks)

    def _rows(self, column: str, number: int) -> list[tuple[int, ...]]:
        """The coordinates of each block of a tensor in a column."""
        entry = self._entries[number]
        flat = self._columns[column][self._coordinates[number] : self._coordinates[number + 1]]
        if not entry.shape:
            return [()] * entry.blocks
        return list(map(tuple, flat.reshape(len(entry.shape), entry.blocks).T.tolist()))

    def _block(
        self,
        entry: _IndexEntry,
        dtype: torch.dtype,
        rank: int,
        start: int,
        offset: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> TensorBlock:
        outside = any(
            at + length > whole
            for at, length, whole in zip(offset, lengths, entry.shape, strict=True)
        )
        end = start + dtypes.byte_count(dtype, lengths)
        if outside or rank >= self.world_size or end > IMAGE_BYTES_MAX:
            raise IntegrityError(
                f"{self._what}: a block of tensor {entry.name!r} has an impossible position"
            )
        return TensorBlock(rank=rank, start=start, end=end, offset=offset, lengths=lengths)


def read_index(data: bytes, *, what: str, bytes_max: int = INDEX_BYTES_MAX) -> Index:
    """Parse an index; allocates at most ``bytes_max`` plus the memory of its names.

    IntegrityError for any defect, NotSupportedError if a newer tierfall wrote it.
    """
    content = _unpacked(data, what, bytes_max)
    (head_bytes,) = struct.unpack_from("<Q", content)
    if head_bytes > min(HEADER_BYTES_MAX, len(content) - LENGTH_BYTES):
        raise IntegrityError(f"{what}: its head claims {head_bytes} bytes, more than it may have")
    head = bytes(memoryview(content)[LENGTH_BYTES : LENGTH_BYTES + head_bytes])
    reader = JsonFields(documents.open_sealed(head, what=what), what)
    world_size = reader.number("world_size", 1, 10**9)
    entries = [_entry(entry, what) for entry in reader.list_of("tensors", list)]
    widths = JsonFields(reader.get("columns", dict), f"{what}: columns")
    begin = aligned(LENGTH_BYTES + head_bytes)
    digest = DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(memoryview(content)[begin:])
    if reader.get("columns_digest", str) != digest:
        raise IntegrityError(f"{what}: its columns are not those that were written")
    blocks = sum(entry.blocks for entry in entries)
    coordinates = sum(entry.blocks * len(entry.shape) for entry in entries)
    counts = {"rank": blocks, "start": blocks, "offset": coordinates, "lengths": coordinates}
    sizes = [(name, counts[name], _width(widths, name, what)) for name in COLUMNS]
    if begin + sum(aligned(count * width) for _, count, width in sizes) != len(content):
        raise IntegrityError(f"{what}: its columns do not have the lengths of its tensors' blocks")
    columns = {}
    for name, count, width in sizes:
        columns[name] = decode_column(content, begin, count, width)
        begin += aligned(count * width)
    return Index(what, world_size, entries, columns)


def _unpacked(data: bytes, what: str, bytes_max: int) -> bytearray:
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: not a zstd frame: {error}") from error
    if not LENGTH_BYTES <= size <= bytes_max:
        raise IntegrityError(
            f"{what}: it claims {size} bytes, unpacked; expected at most {bytes_max}"
        )
    check_frame(memoryview(data), size, what=what)
    content = bytearray(size)
    view, filled = memoryview(content), 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as frame:
            while filled < size and (count := frame.readinto(view[filled:])):
                filled += count
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{what}: its zstd frame is damaged: {error}") from error
    if filled < size:
        raise IntegrityError(f"{what}: its zstd frame ends before the {size} bytes that it claims")
    return content


def _entry(entry: list[Any], what: str) -> _IndexEntry:
    if len(entry) != 4:
        raise IntegrityError(f"{what}: an entry of tensors does not have 4 members")
    name, dtype, shape, blocks = entry
    is_named = isinstance(name, str) and isinstance(dtype, str)
    if not is_named or not dtypes.is_shape(shape) or type(blocks) is not int or blocks < 0:
        raise IntegrityError(f"{what}: an entry of tensors has a member of a wrong type")
    return _IndexEntry(name, dtype, tuple(shape), blocks)


def _width(widths: JsonFields, name: str, what: str) -> int:
    width = widths.number(name, min(WIDTHS), max(WIDTHS))
    if width not in WIDTHS:
        raise IntegrityError(f"{what}: column {name!r} has a width that no integer has")
    return width


def encode_column(values: Iterable[int]) -> Column:
    """Encode values (0 to 2**64 - 1) as differences, little-endian."""
    wide = np.asarray(values, dtype=np.uint64)
    largest = int(wide.max()) if len(wide) else 0
    width = next(width for width in WIDTHS if largest < 1 << 8 * width)
    column: Column = wide.astype(_dtype(width))
    column[1:] -= column[:-1].copy()
    return column


def decode_column(data: bytearray, offset: int, count: int, width: int) -> Column:
    """Decode the column at ``offset`` of ``data`` in place."""
    column: Column = np.frombuffer(data, _dtype(width), count, offset)
    np.add.accumulate(column, dtype=column.dtype, out=column)
    return column


def aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _dtype(width: int) -> np.dtype[Any]:
    return np.dtype(f"<u{width}")
