"""Dividing: which rank writes what several ranks hold alike, so that each byte is written once, and by all in parallel.

Each rank lists in a table what others may hold too: parameters and optimizer state, whole ones and blocks of DTensors.
What may change at any time (buffers, random state, values) may differ between ranks, and stays with its rank. The
division gives every entry that several ranks list to the one of them that has least to write.

Whether they are alike in truth is compared by digests: of all bytes at the first save of a division, and of samples and
a rotating part at every later one (``capture.replicas``). The entries that the same ranks list are a *group*. A rank
posts one digest per group, which keeps the message small however many tensors there are. It keeps the digests of the
single tensors; rank 0 asks for these only where a group differs, to name the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierfall.core.ranks.messages import Message
from tierfall.core.state.item import OnResize
from tierfall.core.state.view import StateView
from tierfall.core.tensors import dtypes
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.tensors import as_bytes, copy_whole
from tierfall.core.types.values import Changes

Keys = NDArray[np.uint64]
_HASHED_BYTES = 64 << 20


class KeyKind(IntEnum):
    """What of a tensor was digested: the last two bits of a key, which are none in a table."""

    WHOLE = 0
    SAMPLES = 1
    RANGES = 2
    SUM = 3


_KEY = np.uint64(~3 & 0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaTable(Message):
    """What one rank saves: ``keys`` of what others may hold alike, with ``sizes`` in bytes, and ``own_bytes`` of what
    nobody else writes. ``structure`` names the state that it is a table of; ``step_s`` is how long a training step
    takes, 0 where that is not known."""

    structure: str
    own_bytes: int
    keys: Keys
    sizes: Keys
    step_s: float = 0.0


class ReplicatedTensors:
    """The tensors of a view that other ranks may hold too, in the order of its table."""

    def __init__(self, view: StateView, structure: str, *, step_s: float = 0.0) -> None:
        """What is of one rank when the number of ranks changes is not shared now: states of one ``structure`` that
        differ in that have tables of different ones. Nor is what lies otherwise in memory, or on another kind of
        device: what is sampled there are not the same bytes."""
        kept = [name for name, rule in view.rules.items() if rule in _OF_ONE_RANK]
        self.view = view
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
            said = (
                f"{name}\n{dtypes.name_of(dtype)}\n{tuple(shape)}\n{piece and tuple(piece)}\n"
                f"{view.strides[number]}\n{view.sources[number].device.type}"
            )
            self.numbers.append(number)
            keys.append(xxhash.xxh3_64_intdigest(said.encode("utf-8", "surrogatepass")) & ~3)
            sizes.append(size)
        column = np.array(keys, dtype=np.uint64)
        self.table = ReplicaTable(
            structure=f"{structure}-{xxhash.xxh3_128_hexdigest(column.tobytes())}",
            own_bytes=own_bytes,
            keys=column,
            sizes=np.array(sizes, dtype=np.uint64),
            step_s=step_s,
        )

    def left_out(self, division: ReplicaAssignment, rank: int) -> dict[int, int]:
        """Return which tensors, by their numbers in the view, other ranks write, and which."""
        owners = division.owners_of(self.table.keys)
        return {
            number: int(owner)
            for number, owner in zip(self.numbers, owners, strict=True)
            if owner not in (NOBODY, rank)
        }

    def names(self) -> dict[int, str]:
        """Return the names of all entries by their keys."""
        names = (self.view.names[number] for number in self.numbers)
        return dict(zip(map(int, self.table.keys), names, strict=True))

    def digests(self, division: ReplicaAssignment) -> ReplicaDigests:
        """Digest, from the live tensors, all bytes of what is written for several ranks."""
        groups = division.groups_of(self.table.keys)
        shared = np.flatnonzero(groups != NOBODY)
        sources = (self.view.sources[self.numbers[at]] for at in shared)
        return ReplicaDigests(
            keys=self.table.keys[shared],
            values=np.array([_digest(source) for source in sources], dtype=np.uint64),
            groups=groups[shared],
        )


_OF_ONE_RANK = (OnResize.PER_RANK, OnResize.DROP)
NOBODY = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaAssignment(Message):
    """Who writes what several ranks hold: ``keys``, ascending, the rank that writes each, ``owners``, and the number of
    the group that each is in, ``groups``. ``id`` is equal where all ranks' tables are. ``entries`` and ``bytes`` are
    what the rank shares that shares most, and ``step_s`` is the shortest step of any: they say how long a rotation
    takes, on which all ranks agree."""

    id: str
    keys: Keys
    owners: NDArray[np.int64]
    groups: NDArray[np.int64]
    entries: int
    bytes: int
    step_s: float

    def owners_of(self, keys: Keys) -> NDArray[np.int64]:
        """Return for each key the rank that writes it for others too, or NOBODY."""
        return self._of(keys, self.owners)

    def groups_of(self, keys: Keys) -> NDArray[np.int64]:
        """Return for each key the number of its group, or NOBODY."""
        return self._of(keys, self.groups)

    def _of(self, keys: Keys, column: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.full(len(keys), NOBODY, dtype=np.int64)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            there = self.keys[at] == keys
            found[there] = column[at[there]]
        return found

    def apart(self) -> ReplicaAssignment:
        """Return the division by which each rank writes all that it holds."""
        none = np.zeros(0, dtype=np.int64)
        return ReplicaAssignment(
            id=f"{self.id}-apart",
            keys=none.astype(np.uint64),
            owners=none,
            groups=none,
            entries=0,
            bytes=0,
            step_s=0.0,
        )


def assign_writers(tables: Sequence[ReplicaTable]) -> ReplicaAssignment:
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
    groups = np.full(len(unique), NOBODY, dtype=np.int64)
    numbers: dict[bytes, int] = {}
    for entry in several[np.argsort(sizes[first[several]], kind="stable")[::-1]]:
        holders = ranks[first[entry] : first[entry] + counts[entry]]
        owner = holders[np.argmin(load[holders])]
        owners[entry] = owner
        groups[entry] = numbers.setdefault(holders.tobytes(), len(numbers))
        load[owner] += int(sizes[first[entry]])
    about = xxhash.xxh3_128()
    for table in tables:
        about.update(table.structure.encode() + table.keys.tobytes() + table.sizes.tobytes())
    shared = [np.isin(table.keys, unique[several]) for table in tables]
    return ReplicaAssignment(
        step_s=min(table.step_s for table in tables),
        id=about.hexdigest(),
        keys=unique[several],
        owners=owners[several],
        groups=groups[several],
        entries=max(int(held.sum()) for held in shared),
        bytes=max(int(table.sizes[held].sum()) for table, held in zip(tables, shared, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaDigests(Message):
    """What one rank digested of tensors that others hold too: their ``keys``, in whose last bits stands what of each
    was digested (``KeyKind``), the digests, ``values``, and the ``groups`` that they are in."""

    keys: Keys
    values: Keys
    groups: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[ReplicaDigests]) -> ReplicaDigests:
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return cls(keys=none.astype(np.uint64), values=none.astype(np.uint64), groups=none)
        return cls(
            keys=np.concatenate([part.keys for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            groups=np.concatenate([part.groups for part in parts]),
        )

    def without(self, groups: Collection[int]) -> ReplicaDigests:
        """Leave groups out."""
        keep = ~np.isin(self.groups, [*groups])
        return ReplicaDigests(
            keys=self.keys[keep], values=self.values[keep], groups=self.groups[keep]
        )

    def by_group(self) -> dict[int, int]:
        """Digest each group as a whole."""
        order = np.lexsort((self.keys, self.groups))
        rows = np.column_stack([self.keys[order], self.values[order]]).astype("<u8")
        numbers, starts = np.unique(self.groups[order], return_index=True)
        ends = [*starts[1:], len(rows)]
        return {
            int(number): xxhash.xxh3_64_intdigest(rows[start:end].tobytes())
            for number, start, end in zip(numbers, starts, ends[: len(starts)], strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """What ranks hold under one name, and not alike: those that have it as the first of them, and those that do not;
    ``more``: so many further tensors are not alike."""

    key: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    more: int = 0


def are_alike(by_group: Mapping[int, Mapping[Any, int]]) -> bool:
    """Say whether all ranks that have a group have one digest of it; given are the digests of groups, by rank."""
    first: dict[Any, int] = {}
    return all(
        first.setdefault(group, digest) == digest
        for digests in by_group.values()
        for group, digest in digests.items()
    )


def find_difference(digests: Mapping[int, ReplicaDigests]) -> ReplicaDifference | None:
    """Compare the digests of ranks; return the first tensor that is not alike."""
    if not digests:
        return None
    ranks_in_order = sorted(digests)
    columns = [digests[rank] for rank in ranks_in_order]
    keys, found, places = _columns([c.keys for c in columns], [c.values for c in columns])
    again = keys[1:] == keys[:-1]
    differs = np.flatnonzero(again & (found[1:] != found[:-1]))
    if not len(differs):
        return None
    key = keys[differs[0]]
    same = keys == key
    alike = found[same] == found[same][0]
    ranks = np.array(ranks_in_order)[places]
    return ReplicaDifference(
        key=int(key & _KEY),
        ranks=tuple(map(int, ranks[same][alike])),
        others=tuple(map(int, ranks[same][~alike])),
        more=len(np.unique(keys[differs] & _KEY)) - 1,
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
    for part in _digest_parts(tensor):
        hasher.update(memoryview(part.numpy()))  # type: ignore[arg-type]
    return hasher.intdigest()


def _digest_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    flat = as_bytes(tensor)
    if flat is None:
        flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        copy_whole(flat, tensor)
    for start in range(0, flat.numel(), _HASHED_BYTES):
        yield flat[start : start + _HASHED_BYTES].cpu()
