"""Resharding: plans to restore a checkpoint of another world size, or of another layout of tensors.

If this rank's own image has the layout of its state, it reads that image, and of other images the tensors that their
ranks wrote for it: an image's header names the rank that writes a replicated tensor, and the header of that rank's
image says where the bytes are. Else the headers of all images are merged (``core/image/merge.py``), and the ranges that
this rank needs are read of each (``BlockReads``).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tierfall.core.copies.checkpoint_reader import PASSABLE, CheckpointReader
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import (
    MergedHeader,
    TensorBlock,
    find_blocks,
    merge_headers,
    table_of,
)
from tierfall.core.load.build import BlockTarget, Fill
from tierfall.core.load.match import SharedMemory
from tierfall.core.load.mismatch import advice_for_ranks
from tierfall.core.load.plan import ReadPlan
from tierfall.core.state.item import OnResize
from tierfall.core.types.errors import IntegrityError, RestoreError
from tierfall.core.types.text import format_ranks
from tierfall.core.types.values import Shard

logger = logging.getLogger("tierfall")


MakePlan = Callable[[ImageHeader], ReadPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRules:
    """How entries that other ranks saved are restored: by ``rules``, by name; or with the values of one rank, if
    ``values_of`` names it. ``of_state``: as ``merge_headers`` has it."""

    values_of: int | None = None
    of_state: bool = False
    rules: Mapping[str, OnResize] = field(default_factory=dict)


def plan_reads_of_rank(
    parts: CheckpointReader, make_plan: MakePlan, shard: Shard, resize: ResizeRules
) -> tuple[ReadPlan, Callable[[], None]]:
    """Plan to restore the state of this rank, ``shard``; return the plan, and a function that reads all its bytes.

    Raises RestoreError where the state does not fit what was saved.
    """
    if parts.world_size == shard.world_size:
        header = parts.header(shard.rank)
        if shard.world_size == 1 and resize.values_of is not None and not header.is_whole:
            return _reshard(parts, make_plan, shard.rank, resize)
        writers = parts.headers(header.writers)
        located = locate(header, writers, shard.rank)
        try:
            plan = make_plan(header)
        except RestoreError as error:
            return _in_another_layout(parts, make_plan, shard, header, error)
        for memory in plan.shared:
            _check_shared(parts, memory, located, shard)
        return plan, plan_reads(parts, located, plan.targets)
    return _reshard(parts, make_plan, shard.rank, resize)


def _check_shared(
    parts: CheckpointReader, memory: SharedMemory, located: MergedHeader, shard: Shard
) -> None:
    """Raise RestoreError where the bytes of targets that share memory differ, or cannot be read here."""
    try:
        parts.fill_here(BlockReads(located, memory.targets).fills)
    except PASSABLE as error:
        if shard.world_size == 1:
            raise
        raise RestoreError(
            f"restore: {memory}, and their values cannot be compared: {error}"
        ) from error
    memory.check()


def _in_another_layout(
    parts: CheckpointReader,
    make_plan: MakePlan,
    shard: Shard,
    header: ImageHeader,
    error: RestoreError,
) -> tuple[ReadPlan, Callable[[], None]]:
    """Plan with the images of all ranks, as this rank's own does not fit its state (``error``). If they cannot be read,
    ``error`` is raised, unless the image holds shards of tensors, of which another layout needs the others."""
    own = ResizeRules(values_of=shard.rank, of_state=True)
    try:
        return _reshard(parts, make_plan, shard.rank, own)
    except PASSABLE as unread:
        if any(stored.piece is not None for stored in header.tensors):
            raise
        logger.warning("restore: the images of other ranks cannot be read either: %s", unread)
        raise error from None


def _reshard(
    parts: CheckpointReader, make_plan: MakePlan, rank: int, resize: ResizeRules
) -> tuple[ReadPlan, Callable[[], None]]:
    merged = merge_images(parts, rank, resize)
    plan = make_plan(merged.header)
    return plan, plan_reads(parts, merged, plan.targets)


def merge_images(parts: CheckpointReader, rank: int, resize: ResizeRules) -> MergedHeader:
    """Read and merge the headers of all images, for ``rank`` of those that restore."""
    headers = parts.headers(range(parts.world_size))
    of = f" of {parts.world_size} ranks" if parts.world_size > 1 else ""
    what = f"{parts.checkpoint.id}{of}"
    return merge_headers(
        headers,
        what=what,
        own=resize.values_of,
        rank=rank,
        rules=resize.rules,
        of_state=resize.of_state,
    )


def plan_reads(
    parts: CheckpointReader, merged: MergedHeader, targets: Iterable[BlockTarget]
) -> Callable[[], None]:
    """Return a function that reads the targets, by where the blocks of their tensors are."""
    compared = {
        block.rank
        for position, others in merged.replicas.items()
        for copy in (merged.blocks[position], *others)
        for block in copy
    }
    manifests = parts.manifests(compared)
    reads = BlockReads(merged, targets, same=_known_equal(merged, manifests))

    def fill() -> None:
        parts.fill(reads.fills)
        reads.finish()

    return fill


def _known_equal(
    merged: MergedHeader, manifests: Mapping[int, Manifest]
) -> Iterable[tuple[TensorBlock, ...]]:
    """Yield replicas at the same position of images whose chunks there have the same digests: their bytes are equal."""
    for position, others in merged.replicas.items():
        first, *rest = merged.blocks[position]
        for copy in others:
            same_bytes = bytes_identity(manifests[first.rank], first)
            same = [bytes_identity(manifests[block.rank], block) for block in copy]
            if not rest and same == [same_bytes]:
                yield copy


def bytes_identity(manifest: Manifest, block: TensorBlock | StoredTensor) -> tuple[Any, ...]:
    """Return what is equal only for blocks of equal bytes: the place, and the digests of the chunks around it."""
    low, high = block.start // manifest.chunk_bytes, (block.end - 1) // manifest.chunk_bytes
    return block.start, block.end, manifest.chunk_bytes, manifest.digests[1 + low : 2 + high]


def locate(header: ImageHeader, writers: Mapping[int, ImageHeader], rank: int) -> MergedHeader:
    """Return where the tensors of the image of ``rank`` are: in it, or in the images of ``writers``, which write them,
    by their headers. Raises IntegrityError as ``find_blocks`` does."""
    tables = {other: table_of(written) for other, written in (*writers.items(), (rank, header))}
    blocks = []
    for stored in header.tensors:
        try:
            found = find_blocks(stored, rank, tables, (0,) * len(stored.shape))
        except IntegrityError as error:
            raise IntegrityError(f"{header.what}: {error}") from error
        blocks.append(found)
    return MergedHeader(header=header, blocks=blocks, replicas={})


# Reads of blocks ----------------------------------------------------------------------------------


class _ReadRange(NamedTuple):
    """A range of the data of one rank's image."""

    rank: int
    start: int
    end: int


class _RowCopy(NamedTuple):
    """A box that is copied out of rows in a buffer."""

    target: torch.Tensor
    source: torch.Tensor


class _ReplicaCheck(NamedTuple):
    """Two replicas that must be equal, of a tensor or of a block of it."""

    name: str
    is_block: bool
    ranks: tuple[int, int]
    one: torch.Tensor
    other: torch.Tensor


class BlockReads:
    """The reads of ``targets``: ``fills`` of each rank's image, in image order. Once all are read, ``finish`` does the
    rest.

    A wanted and a stored block intersect in a box. A box that is one byte range in both blocks is read to its target;
    else the stored bytes from its first to its last element are read into a buffer, and the box is copied out of them
    afterwards.
    """

    def __init__(
        self,
        merged: MergedHeader,
        targets: Iterable[BlockTarget],
        *,
        same: Iterable[tuple[TensorBlock, ...]] = (),
    ) -> None:
        """``same`` are replicas that are known to be equal, and are not compared."""
        self.fills: dict[int, list[Fill]] = {}
        self._merged = merged
        self._same = frozenset(same)
        self._ranges: dict[_ReadRange, list[torch.Tensor]] = {}
        self._checked: set[int] = set()
        self._copies: list[_RowCopy] = []
        self._checks: list[_ReplicaCheck] = []
        for each in targets:
            self._add(each)
        self._join_ranges()

    def finish(self) -> None:
        """Copy from buffers to targets. Raises RestoreError where replicas differ."""
        for check in self._checks:
            if not torch.equal(check.one, check.other):
                raise RestoreError(
                    f"{check.name} is a tensor of its own on {format_ranks(check.ranks)}, and they differ: "
                    f"{advice_for_ranks(check.name, in_blocks=check.is_block)}"
                )
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)

    # ---- planning

    def _add(self, request: BlockTarget) -> None:
        stored = self._merged.header.tensors[request.position]
        offset = request.offset or (0,) * len(stored.shape)
        lengths = stored.shape if request.lengths is None else request.lengths
        for block in self._merged.blocks[request.position]:
            self._box(stored, block, request.target, offset, lengths)
        if request.position not in self._checked and request.position in self._merged.replicas:
            self._checked.add(request.position)
            self._check(stored, request.position)

    def _join_ranges(self) -> None:
        """Read bytes in several ranges once, to the targets of all."""
        edges: dict[int, set[int]] = {}
        for one, other in itertools.pairwise(sorted(self._ranges)):
            if one.rank == other.rank and other.start < one.end:
                edges[one.rank] = set()
        for rank, start, end in self._ranges if edges else ():
            if rank in edges:
                edges[rank].update((start, end))
        cuts = {rank: sorted(found) for rank, found in edges.items()}
        parts: dict[_ReadRange, list[torch.Tensor]] = {}
        for each, targets in self._ranges.items():
            rank, start, end = each
            if rank not in cuts:  # the usual case: no bytes are wanted twice
                parts[each] = targets
                continue
            at = cuts[rank]
            inside = at[bisect.bisect_left(at, start) : bisect.bisect_right(at, end)]
            for low, high in itertools.pairwise(inside):
                found = parts.setdefault(_ReadRange(rank, low, high), [])
                is_whole = (low, high) == (start, end)
                found += targets if is_whole else [t[low - start : high - start] for t in targets]
        for part in sorted(parts):
            fill = Fill(start=part.start, end=part.end, targets=tuple(parts[part]))
            self.fills.setdefault(part.rank, []).append(fill)

    def _read(self, rank: int, start: int, end: int, target: torch.Tensor) -> None:
        if end > start:
            self._ranges.setdefault(_ReadRange(rank, start, end), []).append(target)

    def _box(
        self,
        stored: StoredTensor,
        block: TensorBlock,
        target: torch.Tensor,
        offset: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Read the intersection of a wanted and a stored block."""
        if (*offset, *lengths) == (*block.offset, *block.lengths):
            self._read(block.rank, block.start, block.end, target)
            return
        low = [max(a, b) for a, b in zip(offset, block.offset, strict=True)]
        ends = zip(offset, lengths, block.offset, block.lengths, strict=True)
        size = [min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, low, strict=True)]
        if any(n <= 0 for n in size):
            return
        item = stored.dtype.itemsize
        in_stored = [at - b for at, b in zip(low, block.offset, strict=True)]
        in_wanted = [at - a for at, a in zip(low, offset, strict=True)]
        length = math.prod(size) * item
        if _is_contiguous(size, block.lengths) and _is_contiguous(size, lengths):
            start = block.start + _element_number(in_stored, block.lengths) * item
            to = _element_number(in_wanted, lengths) * item
            self._read(block.rank, start, start + length, target[to : to + length])
            return
        last = [at + n - 1 for at, n in zip(in_stored, size, strict=True)]
        first, end = (_element_number(at, block.lengths) for at in (in_stored, last))
        start, length = block.start + first * item, (end + 1 - first) * item
        buffer = torch.empty(length, dtype=torch.uint8)
        self._read(block.rank, start, start + length, buffer)
        strides = [math.prod(block.lengths[d + 1 :]) * item for d in range(len(size))]
        source = buffer.as_strided((*size, item), (*strides, 1))
        whole = target.view(*lengths, item)
        self._copies.append(_RowCopy(_cut(whole, in_wanted, size), source))

    def _check(self, stored: StoredTensor, position: int) -> None:
        """Read the replicas that are not known to be equal, to compare them."""
        first = self._merged.blocks[position]
        read: dict[tuple[Any, Any], torch.Tensor] = {}
        for copy in self._merged.replicas[position]:
            is_block = sum(math.prod(b.lengths) for b in copy) < math.prod(stored.shape)
            for block in copy if copy not in self._same else ():
                place = block.offset, block.lengths
                other = torch.empty(block.end - block.start, dtype=torch.uint8)
                self._box(stored, block, other, *place)
                if place not in read:
                    read[place] = torch.empty_like(other)
                    for part in first:
                        self._box(stored, part, read[place], *place)
                writers = (part.rank for part in first if part.offset == block.offset)
                ranks = next(writers, first[0].rank), block.rank
                check = _ReplicaCheck(stored.name, is_block, ranks, read[place], other)
                self._checks.append(check)


def _is_contiguous(size: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a box of ``size`` is one byte range in a block of ``lengths``: after its first dimension of more
    than one element, all dimensions are whole."""
    first = next((i for i, n in enumerate(size) if n > 1), len(size))
    return all(n == m for n, m in zip(size[first + 1 :], lengths[first + 1 :], strict=True))


def _element_number(at: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the number of an element in a block, in row-major order."""
    number = 0
    for index, length in zip(at, lengths, strict=True):
        number = number * length + index
    return number


def _cut(tensor: torch.Tensor, at: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + n) for start, n in zip(at, size, strict=True))]
