"""What a rank's image leaves to other ranks: where its bytes are, and the reads of them.

Ranks that hold the same divide the writing of it (``image.dividing``). An image's header names the rank that writes a
tensor, and has it at a place behind the end of its own data; that rank's manifest says where the bytes are.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierfall.core.format.documents import JsonFields
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.load.build import Fill
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class WrittenElsewhere:
    """Where each tensor lies that others write: ``starts`` are the places that the header has them at, ascending, and
    ``ranks`` and ``offsets`` the image and the start in its data."""

    starts: tuple[int, ...]
    ranks: tuple[int, ...]
    offsets: tuple[int, ...]

    def divide(self, fills: Sequence[Fill], own: int) -> dict[int, list[Fill]]:
        """Sort fills by the rank whose image has them, each in image order."""
        found: dict[int, list[Fill]] = {}
        for fill in fills:
            at = bisect.bisect_right(self.starts, fill.start) - 1
            if at < 0:
                found.setdefault(own, []).append(fill)
                continue
            shift = self.offsets[at] - self.starts[at]
            moved = replace(fill, start=fill.start + shift, end=fill.end + shift)
            found.setdefault(self.ranks[at], []).append(moved)
        for part in found.values():
            part.sort(key=lambda fill: fill.start)
        return found


def find_written_elsewhere(
    header: ImageHeader, manifests: Mapping[int, Manifest], rank: int
) -> WrittenElsewhere:
    """Find what ``header``, of ``rank``, leaves to others, in their manifests. Raises IntegrityError where one of them
    does not have it: nothing is allocated for what is only claimed."""
    tables = {other: _table(manifest) for other, manifest in manifests.items()}
    starts, ranks, offsets = [], [], []
    for stored in header.elsewhere:
        owner = stored.written_by
        assert owner is not None
        start = tables[owner].get(_described(stored)) if owner in tables else None
        if start is None:
            raise IntegrityError(
                f"{header.what}: {stored.name} is not there: rank {owner} was to write it for rank {rank}"
            )
        if stored.length:
            starts.append(stored.start)
            ranks.append(owner)
            offsets.append(start)
    return WrittenElsewhere(tuple(starts), tuple(ranks), tuple(offsets))


_Described = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _described(stored: StoredTensor) -> _Described:
    lengths = stored.shape
    shape, offset = lengths, (0,) * len(lengths)
    if stored.piece is not None:
        shape, offset = stored.piece.shape, stored.piece.offset
    return stored.name, dtypes.name_of(stored.dtype), shape, offset, lengths


def _table(manifest: Manifest) -> dict[_Described, int]:
    """Return where a manifest has each tensor; what is not as it must be, is not there."""
    data_bytes = manifest.image_bytes - manifest.data_start
    table = {}
    for entry in json.loads(manifest.pieces):
        found = _read(entry, data_bytes, f"manifest of {manifest.line.checkpoint}")
        if found is not None:
            table[found[0]] = found[1]
    return table


def _read(entry: Any, data_bytes: int, what: str) -> tuple[_Described, int] | None:
    if not isinstance(entry, dict):
        return None
    reader = JsonFields(entry, what)
    shape, offset, lengths = (
        tuple(reader.list_of(name, int)) for name in ("shape", "offset", "lengths")
    )
    dtype = dtypes.from_name(reader.get("dtype", str))
    start, end = reader.number("start", 0, data_bytes), reader.number("end", 0, data_bytes)
    if dtype is None or not dtypes.is_shape(list(lengths)):
        return None
    if end - start != dtypes.byte_count(dtype, lengths):
        return None
    return (reader.get("name", str), dtypes.name_of(dtype), shape, offset, lengths), start
