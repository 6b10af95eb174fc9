"""Dividing: which rank writes what several ranks hold alike, so that each byte is written once, and by all in parallel.

Each rank lists in a table what others may hold too: parameters and optimizer state, whole ones and blocks of DTensors.
What may change at any time (buffers, random state, values) may differ between ranks, and stays with its rank. The
division gives every entry that several ranks list to the one of them that has least to write. Whether they are alike in
truth is compared by digests, at the first save that is divided so.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierfall.core.image import dtypes, naming
from tierfall.core.image.item import OnResize
from tierfall.core.image.tensors import as_bytes, copy_whole
from tierfall.core.image.view import StateView
from tierfall.core.values import Changes

Keys = NDArray[np.uint64]
_HASHED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """What one rank saves: ``keys`` of what others may hold alike, with ``sizes`` in bytes, and ``own_bytes`` of what
    nobody else writes. ``structure`` names the state that it is a table of."""

    structure: str
    own_bytes: int
    keys: Keys
    sizes: Keys

    def to_json(self) -> list[Any]:
        return [self.structure, self.own_bytes, pack(self.keys), pack(self.sizes)]

    @classmethod
    def from_json(cls, data: Any) -> Table:
        structure, own_bytes, keys, sizes = data
        return cls(
            structure=str(structure),
            own_bytes=int(own_bytes),
            keys=unpack(keys),
            sizes=unpack(sizes),
        )


class Shareable:
    """The tensors of a view that other ranks may hold too, in the order of its table."""

    def __init__(self, view: StateView, structure: str) -> None:
        """What is of one rank when the number of ranks changes is not shared now: states of one ``structure`` that
        differ in that have tables of different ones."""
        kept = [name for name, rule in view.rules.items() if rule in _OF_ONE_RANK]
        self._view = view
        self.numbers: list[int] = []
        keys, sizes, own_bytes = [], [], 0
        for number, name in enumerate(view.names):
            dtype, shape = view.dtypes[number], view.shapes[number]
            size = dtypes.byte_count(dtype, shape)
            of_all = view.changes[number] is Changes.ON_STEP and not any(
                naming.is_within(name, prefix) for prefix in kept
            )
            if not of_all or not size:
                own_bytes += size
                continue
            piece = view.pieces[number]
            said = f"{name}\n{dtypes.name_of(dtype)}\n{tuple(shape)}\n{piece and tuple(piece)}"
            self.numbers.append(number)
            keys.append(xxhash.xxh3_64_intdigest(said.encode("utf-8", "surrogatepass")))
            sizes.append(size)
        column = np.array(keys, dtype=np.uint64)
        self.table = Table(
            structure=f"{structure}-{xxhash.xxh3_128_hexdigest(column.tobytes())}",
            own_bytes=own_bytes,
            keys=column,
            sizes=np.array(sizes, dtype=np.uint64),
        )

    def left_out(self, division: Division, rank: int) -> dict[int, int]:
        """Return which tensors, by their numbers in the view, other ranks write, and which."""
        owners = division.owners_of(self.table.keys)
        return {
            number: int(owner)
            for number, owner in zip(self.numbers, owners, strict=True)
            if owner not in (NOBODY, rank)
        }

    def names(self) -> dict[int, str]:
        """Return the names of all entries by their keys."""
        names = (self._view.names[number] for number in self.numbers)
        return dict(zip(map(int, self.table.keys), names, strict=True))

    def digests(self, division: Division) -> Keys:
        """Digest, from the live tensors, what is written for several ranks: one per entry of ``division``, in the order
        of the table."""
        owners = division.owners_of(self.table.keys)
        shared = (n for n, owner in zip(self.numbers, owners, strict=True) if owner != NOBODY)
        return np.array([_digest(self._view.sources[n]) for n in shared], dtype=np.uint64)


_OF_ONE_RANK = (OnResize.PER_RANK, OnResize.DROP)
NOBODY = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Division:
    """Who writes what several ranks hold: ``keys``, ascending, and the rank that writes each, ``owners``. ``id`` is
    equal where all ranks' tables are."""

    id: str
    keys: Keys
    owners: NDArray[np.int64]

    def owners_of(self, keys: Keys) -> NDArray[np.int64]:
        """Return for each key the rank that writes it for others too, or NOBODY."""
        found = np.full(len(keys), NOBODY, dtype=np.int64)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            there = self.keys[at] == keys
            found[there] = self.owners[at[there]]
        return found

    def to_json(self) -> list[Any]:
        return [self.id, pack(self.keys), pack(self.owners.astype(np.uint64))]

    @classmethod
    def from_json(cls, data: Any) -> Division:
        id, keys, owners = data
        return cls(id=str(id), keys=unpack(keys), owners=unpack(owners).astype(np.int64))


def divide(tables: Sequence[Table]) -> Division:
    """Divide what the ranks list, the largest first, each to the one of its ranks that has least to write by then."""
    keys, sizes, ranks = _columns(
        [table.keys for table in tables], [table.sizes for table in tables]
    )
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    load = np.array([table.own_bytes for table in tables], dtype=np.int64)
    alone = first[counts == 1]
    np.add.at(load, ranks[alone], sizes[alone].astype(np.int64))
    several = np.flatnonzero(counts > 1)
    owners = np.full(len(unique), NOBODY, dtype=np.int64)
    for group in several[np.argsort(sizes[first[several]], kind="stable")[::-1]]:
        holders = ranks[first[group] : first[group] + counts[group]]
        owner = holders[np.argmin(load[holders])]
        owners[group] = owner
        load[owner] += int(sizes[first[group]])
    about = xxhash.xxh3_128()
    for table in tables:
        about.update(table.structure.encode() + table.keys.tobytes() + table.sizes.tobytes())
    return Division(id=about.hexdigest(), keys=unique[several], owners=owners[several])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What ranks hold under one name, and not alike: those that have it as the first of them, and those that do not."""

    key: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]


def find_difference(
    division: Division, tables: Sequence[Table], digests: Sequence[Keys]
) -> Difference | None:
    """Compare what ``Shareable.digests`` gave on each rank; return the first that is not alike. Raises ValueError where
    a rank did not digest all that it shares."""
    shared = [table.keys[division.owners_of(table.keys) != NOBODY] for table in tables]
    if [len(keys) for keys in shared] != [len(found) for found in digests]:
        raise ValueError("a rank has not as many digests as it has entries that others share")
    keys, found, ranks = _columns(shared, digests)
    again = keys[1:] == keys[:-1]
    differs = np.flatnonzero(again & (found[1:] != found[:-1]))
    if not len(differs):
        return None
    key = keys[differs[0]]
    same = keys == key
    alike = found[same] == found[same][0]
    return Difference(
        key=int(key),
        ranks=tuple(map(int, ranks[same][alike])),
        others=tuple(map(int, ranks[same][~alike])),
    )


def _columns(keys: Sequence[Keys], values: Sequence[Keys]) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """Put the keys of all ranks, each with its value and its rank, in order: by key, then by rank."""
    ranks = np.repeat(np.arange(len(keys)), [len(column) for column in keys])
    all_keys, all_values = np.concatenate(keys), np.concatenate(values)
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], all_values[order], ranks[order]


def _digest(tensor: torch.Tensor) -> int:
    """Digest a tensor's bytes as an image has them; what lies on a device comes to the host in parts."""
    hasher = xxhash.xxh3_64()
    for part in _parts(tensor):
        hasher.update(memoryview(part.numpy()))  # type: ignore[arg-type]
    return hasher.intdigest()


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    flat = as_bytes(tensor)
    if flat is None:
        flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        copy_whole(flat, tensor)
    for start in range(0, flat.numel(), _HASHED_BYTES):
        yield flat[start : start + _HASHED_BYTES].cpu()


def pack(column: Keys) -> str:
    """Write a column of whole numbers as text."""
    return base64.b64encode(column.astype("<u8").tobytes()).decode("ascii")


def unpack(text: str) -> Keys:
    data = base64.b64decode(text)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64) if data else np.zeros(0, np.uint64)
