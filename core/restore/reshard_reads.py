"""Reads of a reshard: wanted blocks of whole tensors, as reads of the images that hold blocks of them.

A wanted and a stored block intersect in a box. A box that is one byte range in both blocks is read to its target; else
the stored rows that contain it are read into a buffer, and the box is copied out of them afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tierfall.core.image.header import StoredTensor
from tierfall.core.image.merge import MergedHeader, TensorBlock
from tierfall.core.load.build import BlockTarget, Fill
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import format_ranks


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
    """Two replicas that must be equal."""

    name: str
    ranks: tuple[int, int]
    one: torch.Tensor
    other: torch.Tensor


class BlockReads:
    """The reads of ``targets``: ``fills`` of each rank's image, in image order. Once all are read, ``finish`` does the
    rest."""

    def __init__(
        self,
        merged: MergedHeader,
        targets: Iterable[BlockTarget],
        *,
        same: Iterable[tuple[TensorBlock, TensorBlock]] = (),
    ) -> None:
        """``same`` are replicas that are known to be equal, and are not compared."""
        self.fills: dict[int, list[Fill]] = {}
        self._merged = merged
        self._same = frozenset(same)
        self._ranges: dict[_ReadRange, list[torch.Tensor]] = {}
        self._checked: set[int] = set()
        self._copies_first: list[_RowCopy] = []
        self._copies: list[_RowCopy] = []
        self._checks: list[_ReplicaCheck] = []
        for each in targets:
            self._add(each)
        self._join_ranges()

    def finish(self) -> None:
        """Copy from buffers to targets. Raises RestoreError where replicas differ."""
        with torch.no_grad():
            for target, source in self._copies_first:
                target.copy_(source)
        for check in self._checks:
            if not torch.equal(check.one, check.other):
                raise RestoreError(
                    f"{check.name} is a tensor of its own on {format_ranks(check.ranks)}, and they differ: say "
                    "what another number of ranks gets by tierfall.item(..., on_resize='per_rank', 'replicate' or "
                    f"'drop') around it in the state, or leave it as it is by skip=[{check.name!r}]"
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
        """Read ranges that overlap together, into a buffer."""
        cluster: list[_ReadRange] = []
        for byte_range in sorted(self._ranges):
            if cluster and (
                byte_range.rank != cluster[0].rank or byte_range.start >= _end(cluster)
            ):
                self._close(cluster)
                cluster = []
            cluster.append(byte_range)
        if cluster:
            self._close(cluster)

    def _close(self, cluster: Sequence[_ReadRange]) -> None:
        first = cluster[0]
        targets = tuple(self._ranges[first])
        end = _end(cluster)
        if len(cluster) > 1:
            buffer = torch.empty(end - first.start, dtype=torch.uint8)
            for byte_range in cluster:
                part = buffer[byte_range.start - first.start : byte_range.end - first.start]
                self._copies_first += [
                    _RowCopy(target, part) for target in self._ranges[byte_range]
                ]
            targets = (buffer,)
        fill = Fill(start=first.start, end=end, targets=targets)
        self.fills.setdefault(first.rank, []).append(fill)

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
        rows, row = size[0], math.prod(block.lengths[1:]) * item
        start = block.start + in_stored[0] * row
        buffer = torch.empty(rows * row, dtype=torch.uint8)
        self._read(block.rank, start, start + rows * row, buffer)
        source = _cut(buffer.view(rows, *block.lengths[1:], item), [0, *in_stored[1:]], size)
        whole = target.view(*lengths, item)
        self._copies.append(_RowCopy(_cut(whole, in_wanted, size), source))

    def _check(self, stored: StoredTensor, position: int) -> None:
        """Read the replicas that are not known to be equal, to compare them."""
        (first,) = self._merged.blocks[position]
        others = [b for b in self._merged.replicas[position] if (first, b) not in self._same]
        if not others:
            return
        one = torch.empty(first.end - first.start, dtype=torch.uint8)
        self._read(first.rank, first.start, first.end, one)
        for block in others:
            other = torch.empty(block.end - block.start, dtype=torch.uint8)
            self._read(block.rank, block.start, block.end, other)
            ranks = (first.rank, block.rank)
            self._checks.append(_ReplicaCheck(stored.name, ranks, one, other))


def _is_contiguous(size: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a box of ``size`` is one byte range in a block of ``lengths``: after its first dimension of more
    than one element, all dimensions are whole."""
    first = next((i for i, n in enumerate(size) if n > 1), len(size))
    return all(n == m for n, m in zip(size[first + 1 :], lengths[first + 1 :], strict=True))


def _end(cluster: Sequence[_ReadRange]) -> int:
    return max(byte_range.end for byte_range in cluster)


def _element_number(at: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the number of an element in a block, in row-major order."""
    number = 0
    for index, length in zip(at, lengths, strict=True):
        number = number * length + index
    return number


def _cut(tensor: torch.Tensor, at: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(at, size, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor
