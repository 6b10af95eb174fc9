"""Building the merged index from the tensor tables of the ranks' manifests.

Equal tables give equal bytes, whatever their step: while the layout is unchanged, all checkpoints have the same index.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
import zstandard

from tierfall.core.format import documents
from tierfall.core.format.records import DIGEST_PREFIX, HEADER_BYTES_MAX, IMAGE_BYTES_MAX
from tierfall.core.tensor_index.index import (
    COLUMNS,
    INDEX_BYTES_MAX,
    Column,
    aligned,
    encode_column,
)
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import CapacityError, IntegrityError

_LEVEL = 3
_Key = tuple[str, str, tuple[int, ...]]


def _numbers() -> array[int]:
    return array("Q")


@dataclass(slots=True)
class _BlockColumns:
    """The blocks of one tensor so far; offsets and lengths are flat, block by block."""

    ranks: array[int] = field(default_factory=_numbers)
    starts: array[int] = field(default_factory=_numbers)
    offsets: array[int] = field(default_factory=_numbers)
    lengths: array[int] = field(default_factory=_numbers)


class IndexBuilder:
    """Builds one index from the tables of all ranks, added in the order of ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._tensors: dict[_Key, _BlockColumns] = {}
        self._bytes: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, rank: int, pieces: Sequence[Any], *, what: str) -> None:
        """Add the table of one rank's manifest, which ``what`` names; IntegrityError for an invalid entry."""
        try:
            for entry in pieces:
                self._add(rank, entry)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise IntegrityError(
                f"{what}: pieces has an entry that is not a tensor: {error}"
            ) from error

    def _add(self, rank: int, entry: Mapping[str, Any]) -> None:
        """Called up to millions of times: what ranks have in common is validated once."""
        shape, lengths = tuple(entry["shape"]), tuple(entry["lengths"])
        offset, start = entry["offset"], entry["start"]
        stored_bytes = entry["end"] - start
        key = entry["name"], entry["dtype"], shape
        blocks = self._tensors.get(key)
        if blocks is None:
            _check_key(*key)
            blocks = self._tensors[key] = _BlockColumns()
        if stored_bytes == 0 and 0 not in shape:
            return  # this rank's image has no bytes of it
        block_bytes = self._bytes.get((key[1], lengths))
        if block_bytes is None:
            block_bytes = self._bytes[key[1], lengths] = _byte_count(key[1], lengths, stored_bytes)
        if stored_bytes != block_bytes or start + stored_bytes > IMAGE_BYTES_MAX:
            raise ValueError(f"{key[0]!r} has {stored_bytes} bytes from {start} on")
        if not len(shape) == len(offset) == len(lengths):
            raise ValueError(f"{key[0]!r} has {len(shape)} dimensions, and its block has not")
        for at, length, whole in zip(offset, lengths, shape, strict=True):
            if at + length > whole:
                raise ValueError(f"{key[0]!r} is a block outside of its whole")
        blocks.ranks.append(rank)
        blocks.starts.append(start)
        blocks.offsets.extend(offset)
        blocks.lengths.extend(lengths)

    def encode(self, *, bytes_max: int = INDEX_BYTES_MAX) -> bytes:
        """The bytes of ``index.zst``; CapacityError if the index exceeds ``bytes_max`` unpacked."""
        found = self._tensors.values()
        columns = {
            "rank": encode_column(_joined([blocks.ranks for blocks in found])),
            "start": encode_column(_joined([blocks.starts for blocks in found])),
            "offset": encode_column(
                _joined([self._by_dimension(k, "offsets") for k in self._tensors])
            ),
            "lengths": encode_column(
                _joined([self._by_dimension(k, "lengths") for k in self._tensors])
            ),
        }
        body = b"".join(_padded(columns[name].tobytes()) for name in COLUMNS)
        head = documents.seal(
            {
                "world_size": self._world_size,
                "tensors": [
                    [name, dtype, list(shape), len(blocks.ranks)]
                    for (name, dtype, shape), blocks in self._tensors.items()
                ],
                "columns": {name: column.itemsize for name, column in columns.items()},
                "columns_digest": DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(body),
            }
        )
        content = _padded(struct.pack("<Q", len(head)) + head) + body
        if len(head) > HEADER_BYTES_MAX or len(content) > bytes_max:
            raise CapacityError(
                f"index: it would take {len(content)} bytes, more than the {bytes_max} that one may have"
            )
        return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(content)

    def _by_dimension(self, key: _Key, member: str) -> Column:
        """The coordinates of all blocks in the first dimension, then in the next."""
        flat: Column = np.array(getattr(self._tensors[key], member), dtype=np.uint64)
        return flat.reshape(-1, len(key[2])).T.ravel() if key[2] else flat


def _check_key(name: object, dtype: object, shape: tuple[Any, ...]) -> None:
    if not isinstance(name, str) or not isinstance(dtype, str) or not dtypes.is_shape(list(shape)):
        raise ValueError(f"{name!r:.80} has no name, dtype or shape that can be")


def _byte_count(dtype: str, lengths: tuple[Any, ...], stored_bytes: int) -> int:
    """Size of a block in bytes; ``stored_bytes`` if this torch lacks the dtype."""
    if not dtypes.is_shape(list(lengths)):
        raise ValueError("a block has lengths that cannot be")
    known = dtypes.from_name(dtype)
    return stored_bytes if known is None else dtypes.byte_count(known, lengths)


def _joined(parts: Sequence[Any]) -> Column:
    return np.concatenate([np.zeros(0, np.uint64), *(np.asarray(p, np.uint64) for p in parts)])


def _padded(data: bytes) -> bytes:
    return data + bytes(aligned(len(data)) - len(data))
