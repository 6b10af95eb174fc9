"""One checkpoint of any number of ranks as one state: a merged header, and whole tensors, read into mapped files.

The reader of a restore verifies each chunk, once, and copies its bytes to their places. Tensors that are split by
columns, or become another dtype, are assembled in memory first, some rows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tierfall.backends.posix.system import fallocate
from tierfall.core.copies.checkpoint_reader import CheckpointReader, OpenImage
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.image.tree import (
    ConflictNode,
    MapNode,
    Node,
    PiecesNode,
    QuantizedNode,
    TensorNode,
    ValueNode,
    leaves,
    names_above,
    positions_of,
)
from tierfall.core.load.build import BlockTarget, Fill
from tierfall.core.restore.reshard import BlockReads, bytes_identity
from tierfall.core.types.errors import IntegrityError, RestoreError
from tierfall.core.types.values import CheckpointId
from tierfall.export.output import CAST
from tierfall.export.structure import StatePart
from tierfall.telemetry.progress import Progress, Watch

CHUNKS_MAX = 2
"""How many chunks may be in memory at once."""
ROWS_BYTES = 128 << 20
"""The most that is assembled in memory at once, or one row if that is larger."""
COMPARED_BYTES = 16 << 20
"""The most that is compared between two ranks at once."""

T = TypeVar("T")
Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


def mapped_file(path: Path, length: int) -> Memory:
    """Create a file of ``length`` bytes, and map it. Its room is reserved, if the file system can: OSError if there is
    none."""
    with open(path, "xb") as file:
        if not fallocate(file.fileno(), length):
            file.truncate(length)
    return np.memmap(path, np.uint8, "r+", shape=(length,))


def in_batches(
    items: Iterable[T], bytes_of: Callable[[T], int], bytes_max: int
) -> Iterator[list[T]]:
    """Divide items, in their order, into batches of at most ``bytes_max`` bytes; a larger item is alone in one."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + bytes_of(item) > bytes_max:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_of(item)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCheckpoint:
    """One checkpoint, merged over its ranks. ``own`` is the name below which entries of single ranks are that differ
    from rank 0's, if there are any."""

    run: str
    id: CheckpointId
    merged: MergedHeader
    images: CheckpointReader
    own: str | None

    @property
    def header(self) -> ImageHeader:
        return self.merged.header

    def check(self, parts: Sequence[StatePart]) -> None:
        """Raise RestoreError for a part that differs among the ranks, or is incomplete."""
        for part in parts:
            for name, leaf in leaves(part.node, part.name):
                if isinstance(leaf, ConflictNode):
                    raise RestoreError(f"{self.header.what}: {name}: {leaf.reason}")
        for position in positions_in(parts):
            stored, blocks = self.header.tensors[position], self.merged.blocks[position]
            if sum(block.end - block.start for block in blocks) < stored.length:
                raise RestoreError(f"{self.header.what}: {stored.name}: it is incomplete")

    def report_to(self, watch: Watch, parts: Sequence[StatePart]) -> None:
        """Report to ``watch`` how many bytes of these parts are read from now on."""
        total = sum(self.header.tensors[position].length for position in positions_in(parts))
        self.images.tally.on_bytes = Progress(watch, total).add

    def read(
        self, targets: Mapping[int, Sequence[torch.Tensor]], dtype: torch.dtype | None = None
    ) -> None:
        """Read tensors to flat memory, one target or more each; those of floating-point numbers become ``dtype``.

        Raises as ``ChunkReader.read`` does.
        """
        converted = frozenset() if dtype is None else CAST - {dtype}
        assembled = {
            position
            for position in targets
            if self.header.tensors[position].dtype in converted or self._is_cut(position)
        }
        straight = targets.keys() - assembled
        self._fill([BlockTarget(position=p, target=t) for p in straight for t in targets[p]])
        rows = (block for position in sorted(assembled) for block in self._rows(position))
        for batch in in_batches(rows, lambda block: block.target.nbytes, ROWS_BYTES):
            self._fill(batch)
            for block in batch:
                data, stored = block.target, self.header.tensors[block.position].dtype
                if dtype is not None and stored in converted:
                    data = data.view(stored).to(dtype).view(torch.uint8)
                first, count = (block.offset or (0,))[0], (block.lengths or (1,))[0]
                start = first * (data.numel() // count)
                for target in targets[block.position]:
                    target[start : start + data.numel()] = data

    def _fill(self, targets: Sequence[BlockTarget]) -> None:
        reads = BlockReads(self.merged, targets)
        self.images.fill_here(reads.fills)
        reads.finish()

    def _rows(self, position: int) -> Iterator[BlockTarget]:
        """Yield memory for the rows of a tensor, at most ROWS_BYTES at a time."""
        stored = self.header.tensors[position]
        count, *row = stored.shape or (1,)
        row_bytes = stored.length // max(count, 1)
        step = max(1, ROWS_BYTES // max(row_bytes, 1))
        dimensions = len(stored.shape)
        for first in range(0, count, step):
            rows = min(step, count - first)
            yield BlockTarget(
                position=position,
                target=torch.empty(rows * row_bytes, dtype=torch.uint8),
                offset=(first, *(0 for _ in row))[:dimensions],
                lengths=(rows, *row)[:dimensions],
            )

    def _is_cut(self, position: int) -> bool:
        """Return whether some block of a tensor is not a contiguous range of it."""
        stored = self.header.tensors[position]
        blocks = self.merged.blocks[position]
        return stored.length > 0 and any(b.lengths[1:] != stored.shape[1:] for b in blocks)


def gather(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage
) -> MergedCheckpoint:
    """Read the headers of all ranks from ``tiers``, fastest first, and merge them, rank 0's values first.

    Raises as ``find_images`` and ``ChunkReader.read`` do.
    """
    commit = checkpoint.commit
    if commit is None:
        raise checkpoint.unread or IntegrityError(
            f"export: every commit record of {checkpoint.id} is damaged"
        )
    images = CheckpointReader(checkpoint, tiers, open_image, ReadTally(), None, CHUNKS_MAX)
    world_size = commit.world_size
    headers, own = separate_per_rank(
        images.headers(range(world_size)),
        lambda rank, pairs: _differing(images, rank, pairs),
    )
    of = f" of {world_size} ranks" if world_size > 1 else ""
    merged = merge_headers(headers, what=f"{checkpoint.id}{of}", own=0)
    return MergedCheckpoint(
        run=commit.lineage.run,
        id=checkpoint.id,
        merged=replace(merged, replicas={}),  # of what rank 0 lacks, any rank's is exported
        images=images,
        own=own if any(key == own for key, _ in merged.header.tree.entries) else None,
    )


# Comparing ranks -------------------------------------------------------------------------------------


def _differing(
    images: CheckpointReader, own: int, pairs: Sequence[TensorPair]
) -> frozenset[TensorPair]:
    """Return the pairs whose bytes differ. Equal digests of their chunks prove equality; other pairs are read, some at
    once, since neighbours share chunks."""
    mine, its = images.find(own)[1], images.find(0)[1]
    slices: list[Slice] = [
        (pair, at, min(at + COMPARED_BYTES, pair.own.length))
        for pair in dict.fromkeys(pairs)
        if bytes_identity(mine, pair.own) != bytes_identity(its, pair.first)
        for at in range(0, pair.own.length, COMPARED_BYTES)
    ]
    slices.sort(key=lambda piece: piece[0].own.start + piece[1])
    found: set[TensorPair] = set()
    for batch in in_batches(slices, lambda piece: piece[2] - piece[1], COMPARED_BYTES):
        ours = [(p.own.start + low, p.own.start + high) for p, low, high in batch]
        theirs = [(p.first.start + low, p.first.start + high) for p, low, high in batch]
        read = zip(batch, _read(images, own, ours), _read(images, 0, theirs), strict=True)
        found.update(pair for (pair, *_), one, other in read if not torch.equal(one, other))
    return frozenset(found)


def _read(
    images: CheckpointReader, rank: int, ranges: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    read = {span: torch.empty(span[1] - span[0], dtype=torch.uint8) for span in sorted(set(ranges))}
    fills = [Fill(start=s, end=e, targets=(t,)) for (s, e), t in read.items()]
    images.fill_here({rank: fills})
    return [read[span] for span in ranges]


def positions_in(parts: Sequence[StatePart]) -> list[int]:
    return sorted({position for part in parts for position in positions_of(part.node)})


# Entries that differ -----------------------------------------------------------------------------------

PER_RANK = "per_rank"


class TensorPair(NamedTuple):
    """Two tensors of one name, a rank's own and rank 0's, whose bytes are to be compared."""

    own: StoredTensor
    first: StoredTensor


Slice = tuple[TensorPair, int, int]
"""Bytes of two tensors, from the first of these to the second."""

Differing = Callable[[int, Sequence[TensorPair]], frozenset[TensorPair]]
"""Returns the pairs of a rank whose bytes differ."""


def separate_per_rank(
    headers: Mapping[int, ImageHeader], differing: Differing
) -> tuple[dict[int, ImageHeader], str]:
    """Return headers that can be merged without loss, and the name of the entry with the ranks' own values.

    A merged checkpoint has one value per name, rank 0's. Another rank's different value of that name (its random state,
    a counter) moves to ``per_rank.<rank>.<name>``.
    """
    used = {key for header in headers.values() for key, _ in header.tree.entries}
    name = PER_RANK
    while name in used:
        name += "_"
    first = _FirstRank(headers[0])
    result = {0: headers[0]}
    for rank, header in headers.items():
        if rank == 0:
            continue
        compared = [
            (leaf_name, node, first.pairs(header, leaf_name, node))
            for leaf_name, node in leaves(header.tree, "")
        ]
        different = differing(rank, [pair for _, _, pairs in compared for pair in pairs or ()])
        own = [
            (n, node)
            for n, node, pairs in compared
            if pairs is None or not different.isdisjoint(pairs)
        ]
        result[rank] = _with_own(header, name, rank, own) if own else header
    return result, name


class _FirstRank:
    """Rank 0's leaves by name."""

    def __init__(self, header: ImageHeader) -> None:
        self._header = header
        self._leaves = dict(leaves(header.tree, ""))
        self._above = {above for name in self._leaves for above in names_above(name)}

    def pairs(self, header: ImageHeader, name: str, node: Node) -> list[TensorPair] | None:
        """The tensors whose bytes decide whether rank 0 has the same leaf; None if it certainly has not."""
        counterpart = self._leaves.get(name)
        if isinstance(node, PiecesNode) or isinstance(counterpart, PiecesNode):
            return []  # blocks of one tensor, of which one rank has none or several
        if counterpart is None:
            is_covered = name in self._above or any(
                above in self._leaves for above in names_above(name)
            )
            return None if is_covered else []  # a name that rank 0 lacks is merged as it is
        if _form(header, node) != _form(self._header, counterpart):
            return None
        found = []
        for a, b in zip(positions_of(node), positions_of(counterpart), strict=True):
            own, first = header.tensors[a], self._header.tensors[b]
            if own.piece is not None or first.piece is not None:
                continue  # blocks of one tensor differ by design
            if (own.dtype, own.shape) != (first.dtype, first.shape):
                return None
            if own.length > 0 and not own.writers and not first.writers:
                found.append(TensorPair(own, first))
        return found


def _form(header: ImageHeader, node: Node) -> Any:
    """The structure of a leaf, and its values: equal on two ranks if at most the bytes of tensors differ."""
    return _rewritten(node, lambda _: 0, lambda n: json.dumps(header.values[n], sort_keys=True))


# Moving entries --------------------------------------------------------------------------------------


def _with_own(
    header: ImageHeader, key: str, rank: int, own: Sequence[tuple[str, Node]]
) -> ImageHeader:
    """The header with these entries also below ``key``, their tensors under new names."""
    tensors = list(header.tensors)
    moved: dict[int, int] = {}
    for position in sorted({position for _, node in own for position in positions_of(node)}):
        stored = header.tensors[position]
        if stored.writers:
            moved[position] = position  # other ranks write it, under this name
            continue
        moved[position] = len(tensors)
        tensors.append(replace(stored, name=f"{key}.{rank}.{stored.name}", piece=None))
    root: dict[str, Any] = {}
    for name, node in own:
        _insert(root, name, _rewritten(node, moved.__getitem__))
    entry = (key, MapNode("dict", ((str(rank), _tree(root)),)))
    tree = replace(header.tree, entries=(*header.tree.entries, entry))
    return replace(header, tensors=tuple(tensors), tree=tree)


def _insert(root: dict[str, Any], name: str, node: Node) -> None:
    *folders, last = name.split(".")
    at: Any = root
    for folder in folders:
        at = at.setdefault(folder, {})
        if not isinstance(at, dict):  # one module key is a prefix of another
            root[name] = node
            return
    if last in at:
        root[name] = node
    else:
        at[last] = node


def _tree(entries: Mapping[str, Any]) -> MapNode:
    return MapNode(
        "dict",
        tuple((key, _tree(e) if isinstance(e, dict) else e) for key, e in entries.items()),
    )


def _rewritten(
    part: Any, position: Callable[[int], int], number: Callable[[int], Any] = lambda number: number
) -> Any:
    """A part of a tree with other positions of tensors, and numbers of values."""
    match part:
        case TensorNode():
            return TensorNode(position(part.position))
        case ValueNode():
            return ValueNode(number(part.number), tuple(map(position, part.blobs)))
        case PiecesNode():
            return PiecesNode(tuple(map(position, part.positions)))
        case QuantizedNode():
            part = replace(part, position=position(part.position))
    if type(part) is tuple:
        return tuple(_rewritten(each, position, number) for each in part)
    if not isinstance(part, Node):
        return part
    inside = {each.name: getattr(part, each.name) for each in fields(part)}
    new = {name: _rewritten(each, position, number) for name, each in inside.items()}
    return replace(part, **new)
