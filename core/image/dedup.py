"""Deduplication of replicas: assigns each replicated tensor to one rank, or parts of it to several, so that its bytes
are written once, and all ranks write as many.

Each rank lists potential replicas in a table: parameters and optimizer state, and all blocks of sharded tensors. Other
buffers, random state and values may change at any time and differ between ranks; each rank writes its own. Every entry
that several ranks list is assigned to the one of them with the fewest bytes to write. If that leaves the ranks unequal,
large entries are divided: consecutive ranks, which are those of one node, write consecutive parts.

Digests verify that the replicas are equal: of all bytes at the first save of an assignment, of samples and a rotating
part at later ones (``core.sampling.replicas``). The entries listed by the same ranks form a *group*. A rank sends one
digest per group, so that the message is small for any number of tensors. It keeps the digests of single tensors; rank
0 requests these only if a group differs, to name the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierfall.core.image.layout import TensorParts
from tierfall.core.ranks.messages import Message, Signed, Unsigned
from tierfall.core.state.item import OnResize
from tierfall.core.state.view import StateView
from tierfall.core.tensors import dtypes
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.tensors import as_bytes, copy_whole
from tierfall.core.types.values import Changes

Keys = Unsigned
_HASHED_BYTES = 64 << 20
PART_BYTES = 64 << 10
"""A tensor is divided between rows that are not longer, or else within one."""
UNEVEN = 0.02
"""If a rank writes so much less than one that holds the same tensors, and a chunk less, tensors are divided."""


class KeyKind(IntEnum):
    """The digested part of a tensor: the last two bits of a key, which are 0 in a table."""

    WHOLE = 0
    SAMPLES = 1
    RANGES = 2
    SUM = 3


_KEY = np.uint64(~3 & 0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaTable(Message):
    """What one rank saves: ``keys`` and ``sizes`` (bytes) of potential replicas, the lengths of which their parts are
    multiples (``units``; 0: not to be divided), and ``own_bytes`` that no other rank can write. ``structure``
    identifies the structure of the state, ``chunk_bytes`` are as configured."""

    structure: str
    own_bytes: int
    chunk_bytes: int
    keys: Keys
    sizes: Keys
    units: Keys


class ReplicatedTensors:
    """The potential replicas of a view, in the order of its table."""

    def __init__(self, view: StateView, structure: str, chunk_bytes: int) -> None:
        """Entries with the rules PER_RANK and DROP are not shared; states of one ``structure`` with other such rules
        get tables of different structures. Keys include memory layout and device type: samples of other layouts are not
        of the same bytes."""
        per_rank = [name for name, rule in view.rules.items() if rule in _OF_ONE_RANK]
        self.view = view
        self.numbers: list[int] = []
        keys, sizes, units, own_bytes = [], [], [], 0
        for number, name in enumerate(view.names):
            dtype, shape = view.dtypes[number], view.shapes[number]
            size = dtypes.byte_count(dtype, shape)
            piece = view.block_positions[number]
            is_shareable = (
                view.changes[number] is Changes.ON_STEP or piece is not None
            ) and not any(naming.is_within(name, prefix) for prefix in per_rank)
            if not is_shareable or not size:
                own_bytes += size
                continue
            identity = (
                f"{name}\n{dtypes.name_of(dtype)}\n{tuple(shape)}\n{piece and tuple(piece)}\n"
                f"{view.strides[number]}\n{view.plain[number]}\n{view.sources[number].device.type}"
            )
            self.numbers.append(number)
            keys.append(xxhash.xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass")) & ~3)
            sizes.append(size)
            is_whole = not view.plain[number] or view.sources[number].is_quantized
            units.append(0 if is_whole else _unit(dtype.itemsize, shape))
        column = np.array(keys, dtype=np.uint64)
        self.table = ReplicaTable(
            structure=f"{structure}-{xxhash.xxh3_128_hexdigest(column.tobytes())}",
            own_bytes=own_bytes,
            chunk_bytes=chunk_bytes,
            keys=column,
            sizes=np.array(sizes, dtype=np.uint64),
            units=np.array(units, dtype=np.uint64),
        )

    def written_by_others(
        self, assignment: ReplicaAssignment, rank: int
    ) -> dict[int, int | TensorParts]:
        """The tensors that other ranks write, or parts of them, by number in the view."""
        owners = assignment.owners_of(self.table.keys)
        divided = assignment.parts()
        found: dict[int, int | TensorParts] = {}
        for number, key, owner in zip(self.numbers, self.table.keys, owners, strict=True):
            if parts := divided.get(int(key)):
                own = next((n for n, (writer, _) in enumerate(parts) if writer == rank), None)
                found[number] = TensorParts(parts=parts, own=own)
            elif owner not in (NOBODY, rank):
                found[number] = int(owner)
        return found

    def names(self) -> dict[int, str]:
        """The names of all entries by key."""
        names = (self.view.names[number] for number in self.numbers)
        return dict(zip(map(int, self.table.keys), names, strict=True))

    def digests(self, assignment: ReplicaAssignment) -> ReplicaDigests:
        """Digest all bytes of the replicas, from the live tensors."""
        groups = assignment.groups_of(self.table.keys)
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
    """Which rank writes each replica: ascending ``keys``, the writing ranks (``owners``) and group numbers
    (``groups``). Of each divided one, key, rank and end of each part, in order (``part_keys``, ``part_owners``,
    ``part_ends``); its owner is the first of these. ``id`` is a digest of all ranks' tables. ``entries`` and ``bytes``
    are maxima over the ranks of what each shares; all ranks derive the length of a rotation from them."""

    id: str
    keys: Keys
    owners: Signed
    groups: Signed
    part_keys: Keys
    part_owners: Signed
    part_ends: Signed
    entries: int
    bytes: int

    @property
    def writers(self) -> set[int]:
        """The ranks that write something for others."""
        return {*map(int, self.owners), *map(int, self.part_owners)}

    def parts(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Rank and end of each part of the divided tensors, by key."""
        rows = zip(self.part_keys, self.part_owners, self.part_ends, strict=True)
        found: dict[int, tuple[tuple[int, int], ...]] = {}
        for key, owner, end in rows:
            found[int(key)] = (*found.get(int(key), ()), (int(owner), int(end)))
        return found

    def owners_of(self, keys: Keys) -> NDArray[np.int64]:
        """For each key, the rank that writes it for several ranks, or NOBODY."""
        return self._of(keys, self.owners)

    def groups_of(self, keys: Keys) -> NDArray[np.int64]:
        """For each key, the number of its group, or NOBODY."""
        return self._of(keys, self.groups)

    def _of(self, keys: Keys, column: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.full(len(keys), NOBODY, dtype=np.int64)
        if len(self.keys):
            at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            is_known = self.keys[at] == keys
            found[is_known] = column[at[is_known]]
        return found

    def unshared(self) -> ReplicaAssignment:
        """The assignment by which each rank writes everything of its own."""
        none = np.zeros(0, dtype=np.int64)
        return ReplicaAssignment(
            id=f"{self.id}-apart",
            keys=none.astype(np.uint64),
            owners=none,
            groups=none,
            part_keys=none.astype(np.uint64),
            part_owners=none,
            part_ends=none,
            entries=0,
            bytes=0,
        )


def assign_writers(tables: Sequence[ReplicaTable]) -> ReplicaAssignment:
    """Assign replicas in order of size, the largest first, each to the rank with the fewest bytes to write so far. If
    the ranks are too unequal then, divide them."""
    keys, sizes, ranks = _columns(
        [table.keys for table in tables], [table.sizes for table in tables]
    )
    units = _columns([table.keys for table in tables], [table.units for table in tables])[1]
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    load = np.array([table.own_bytes for table in tables], dtype=np.int64)
    single = first[counts == 1]
    np.add.at(load, ranks[single], sizes[single].astype(np.int64))
    unshared = load.copy()
    several = np.flatnonzero(counts > 1)
    owners = np.full(len(unique), NOBODY, dtype=np.int64)
    groups = np.full(len(unique), NOBODY, dtype=np.int64)
    members: dict[bytes, list[int]] = {}
    for entry in several[np.argsort(sizes[first[several]], kind="stable")[::-1]]:
        holders = ranks[first[entry] : first[entry] + counts[entry]]
        owner = holders[np.argmin(load[holders])]
        owners[entry] = owner
        members.setdefault(holders.tobytes(), []).append(int(entry))
        load[owner] += int(sizes[first[entry]])
    for number, entries in enumerate(members.values()):
        groups[entries] = number
    parts: list[tuple[int, int, int]] = []
    chunk_bytes = max(table.chunk_bytes for table in tables)
    loads = (load[np.frombuffer(group, dtype=ranks.dtype)] for group in members)
    if any(np.ptp(each) > max(each.max() * UNEVEN, chunk_bytes) for each in loads):
        of_entry = sizes[first].astype(np.int64), units[first].astype(np.int64)
        undivided = owners.copy()
        for group, entries in sorted(members.items(), key=lambda each: len(each[0])):
            those = np.frombuffer(group, dtype=ranks.dtype)
            parts += _divide(those, entries, unshared, owners, *of_entry)
        if unshared.max() > load.max():  # of groups with some ranks in common
            owners, parts = undivided, []
    parts.sort()
    id_hash = xxhash.xxh3_128()
    for table in tables:
        columns = (table.keys, table.sizes, table.units)
        id_hash.update(table.structure.encode() + b"".join(each.tobytes() for each in columns))
    shared = [np.isin(table.keys, unique[several]) for table in tables]
    return ReplicaAssignment(
        id=id_hash.hexdigest(),
        keys=unique[several],
        owners=owners[several],
        groups=groups[several],
        part_keys=np.array([unique[entry] for entry, _, _ in parts], dtype=np.uint64),
        part_owners=np.array([owner for _, _, owner in parts], dtype=np.int64),
        part_ends=np.array([end for _, end, _ in parts], dtype=np.int64),
        entries=max(int(mask.sum()) for mask in shared),
        bytes=max(int(table.sizes[mask].sum()) for table, mask in zip(tables, shared, strict=True)),
    )


def _divide(
    holders: NDArray[np.int64],
    entries: Sequence[int],
    load: NDArray[np.int64],
    owners: NDArray[np.int64],
    sizes: NDArray[np.int64],
    units: NDArray[np.int64],
) -> list[tuple[int, int, int]]:
    """Assign the entries that the same ranks hold again, so that these write equally many bytes: one entry after the
    other goes to one rank after the other, and is divided at the end of a rank's share. First go those that cannot be.

    Sets ``owners``, adds to the ``load`` of the ranks, and returns entry, end and rank of each part of divided entries.
    """
    divisible = np.array([entry for entry in entries if units[entry]], dtype=np.int64)
    for entry in entries:
        if not units[entry]:
            owner = owners[entry] = holders[np.argmin(load[holders])]
            load[owner] += sizes[entry]
    ends = np.cumsum(sizes[divisible])
    shares = np.cumsum(_shares(load[holders], int(ends[-1]) if len(ends) else 0))
    found: list[tuple[int, int, int]] = []
    for entry, end in zip(divisible, ends, strict=True):
        start, unit = end - sizes[entry], units[entry]
        wanted = np.rint(np.clip((shares - start) / unit, 0, sizes[entry] // unit)).astype(np.int64)
        wanted[-1] = sizes[entry] // unit
        at = np.diff(wanted * unit, prepend=0)
        writing = np.flatnonzero(at)
        owners[entry] = holders[writing[0]]
        load[holders] += at
        if len(writing) > 1:
            found += [(int(entry), int(wanted[n] * unit), int(holders[n])) for n in writing]
    return found


def _shares(load: NDArray[np.int64], total: int) -> NDArray[np.float64]:
    """How many of ``total`` bytes each rank is to write, so that those that write any have written equally many."""
    low = np.sort(load)
    levels = (total + np.cumsum(low)) / np.arange(1, len(low) + 1)
    level = levels[np.flatnonzero(levels >= low)[-1]]
    shares: NDArray[np.float64] = np.maximum(level - load, 0.0)
    return shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaDigests(Message):
    """One rank's digests of replicas: ``keys`` with a KeyKind in the last two bits, digests (``values``), and group
    numbers."""

    keys: Keys
    values: Keys
    groups: Signed

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
        """The digests without those of some groups."""
        keep = ~np.isin(self.groups, [*groups])
        return ReplicaDigests(
            keys=self.keys[keep], values=self.values[keep], groups=self.groups[keep]
        )

    def by_group(self) -> dict[int, int]:
        """One digest per group."""
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
    """A tensor that differs between ranks: ``ranks`` have it as the lowest rank does, ``others`` do not. ``more``
    counts further such tensors."""

    key: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    more: int = 0


def digests_agree(by_group: Mapping[int, Mapping[Any, int]]) -> bool:
    """Whether all ranks that have a group have the same digest of it. ``by_group``: digests by group, by rank."""
    first: dict[Any, int] = {}
    return all(
        first.setdefault(group, digest) == digest
        for digests in by_group.values()
        for group, digest in digests.items()
    )


def find_difference(digests: Mapping[int, ReplicaDigests]) -> ReplicaDifference | None:
    """Compare the ranks' digests; return the first tensor that differs."""
    if not digests:
        return None
    ranks_in_order = sorted(digests)
    columns = [digests[rank] for rank in ranks_in_order]
    keys, found, places = _columns([c.keys for c in columns], [c.values for c in columns])
    is_repeated = keys[1:] == keys[:-1]
    differs = np.flatnonzero(is_repeated & (found[1:] != found[:-1]))
    if not len(differs):
        return None
    key = keys[differs[0]]
    rows = keys == key
    equal = found[rows] == found[rows][0]
    ranks = np.array(ranks_in_order)[places]
    return ReplicaDifference(
        key=int(key & _KEY),
        ranks=tuple(map(int, ranks[rows][equal])),
        others=tuple(map(int, ranks[rows][~equal])),
        more=len(np.unique(keys[differs] & _KEY)) - 1,
    )


def _columns(keys: Sequence[Keys], values: Sequence[Keys]) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """Keys, values and ranks of all entries, sorted by key, then by rank."""
    ranks = np.repeat(np.arange(len(keys)), [len(column) for column in keys])
    all_keys, all_values = np.concatenate(keys), np.concatenate(values)
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], all_values[order], ranks[order]


def _unit(size: int, shape: Sequence[int]) -> int:
    """The length of the longest rows, of ``size`` bytes an element, between which a tensor is divided."""
    for length in reversed(shape):
        if size * length > PART_BYTES:
            break
        size *= length
    return size


def _digest(tensor: torch.Tensor) -> int:
    """Digest a tensor's bytes as in an image; a device's bytes are copied to the host in parts."""
    hasher, flat = xxhash.xxh3_64(), as_bytes(tensor)
    if flat is None:  # copied to the host: a device may have no memory for it
        flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        copy_whole(flat, tensor)
    for start in range(0, flat.numel(), _HASHED_BYTES):
        part = flat[start : start + _HASHED_BYTES].cpu()
        hasher.update(memoryview(part.numpy()))  # type: ignore[arg-type]
    return hasher.intdigest()
