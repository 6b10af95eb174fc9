"""The merged header of a checkpoint of several ranks, from one rank's header and the merged index, without reading the
other headers.

The header has the tree and that rank's values, the index all blocks of the tensors. This suffices if no other rank has
a tensor that this header does not name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import MergedHeader, TensorBlock, replace_pieces, split_blocks
from tierfall.core.image.tree import PiecesNode, TensorNode, leaves
from tierfall.core.tensor_index.index import Index
from tierfall.core.tensors.dtypes import byte_count
from tierfall.core.types.errors import IntegrityError

_FURTHER = re.compile(r"%p\d+\Z")
"""The suffix of all blocks of a tensor but the first; in names of the state, ``%`` is escaped."""


@dataclass(frozen=True, slots=True)
class _WholeTensor:
    """A whole tensor, the names of its blocks in the index, and what this rank's image has of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    names: tuple[str, ...]
    own: StoredTensor | None


def merge_with_index(
    header: ImageHeader, rank: int, index: Index, *, what: str
) -> MergedHeader | None:
    """Merge as ``merge_headers`` does for ``rank``, whose header this is; blocks are looked up on access.

    None if header and index are not sufficient or do not match; then all headers must be read. Ties are those of this
    header. A tensor that is whole here is this rank's own, whatever other ranks have under its name.
    """
    own = split_blocks({rank: header})[rank]
    names: dict[str, list[str]] = {}
    for name in index.names:
        names.setdefault(_whole_name(name), []).append(name)
    others = [name for name, node in leaves(own.tree, "") if isinstance(node, PiecesNode)]
    own_names = [_whole_name(stored.name) for stored in own.tensors]
    if names.keys() != {*own_names, *others}:
        return None
    sources: list[_WholeTensor] = []
    known: list[StoredTensor | None] = [*own.tensors, *(None for _ in others)]
    for name, stored in zip([*own_names, *others], known, strict=True):
        source = _source(name, names[name], stored, index)
        if source is None:
            return None
        sources.append(source)
    positions = iter(range(len(own.tensors), len(sources)))
    tree = replace_pieces(own.tree, lambda _: TensorNode(next(positions)))
    wholes, end = [], 0
    for source in sources:
        start, end = end, end + byte_count(source.dtype, source.shape)
        wholes.append(StoredTensor(source.name, source.dtype, source.shape, start, end))
    whole = ImageHeader(
        what=what,
        data_start=0,
        data_bytes=end,
        tensors=tuple(wholes),
        tree=tree,
        values=own.values,
        merged=True,
    )
    return MergedHeader(header=whole, blocks=_SlotBlocks(rank, sources, index), replicas={})


def _whole_name(name: str) -> str:
    return _FURTHER.sub("", name)


def _source(
    name: str, names: Iterable[str], stored: StoredTensor | None, index: Index
) -> _WholeTensor | None:
    """Describe a tensor; None if ranks differ in its dtype or shape, or if several ranks have all of it, which only a
    comparison could show to be replicas."""
    kinds = {kind for each in names for kind in index.kinds(each)}
    if len(kinds) != 1:
        return None
    dtype, shape = kinds.pop()
    if stored is None:
        blocks = [b for each in names for tensor in index.find(each) for b in tensor.blocks]
        if len(blocks) > 1 and any(block.lengths == shape for block in blocks):
            return None
        return _WholeTensor(name, dtype, shape, tuple(names), None)
    if (dtype, shape) != (stored.dtype, stored.whole_shape):
        return None
    return _WholeTensor(name, dtype, shape, tuple(names), stored)


class _SlotBlocks(Sequence[tuple[TensorBlock, ...]]):
    """By position, the blocks to read a tensor from: each once, this rank's own if it has it."""

    def __init__(self, rank: int, sources: Sequence[_WholeTensor], index: Index) -> None:
        self._rank = rank
        self._sources = sources
        self._index = index

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, position: int) -> tuple[TensorBlock, ...]: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[tuple[TensorBlock, ...]]: ...
    def __getitem__(
        self, position: int | slice
    ) -> tuple[TensorBlock, ...] | Sequence[tuple[TensorBlock, ...]]:
        if isinstance(position, slice):
            return [self[number] for number in range(len(self))[position]]
        source = self._sources[position]
        own = source.own
        first = self._rank if own is None or own.written_by is None else own.written_by
        copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TensorBlock]] = {}
        for name in source.names:
            for tensor in self._index.find(name):
                for block in tensor.blocks:
                    copies.setdefault((block.offset, block.lengths), []).append(block)
        if own is not None and own.piece is None:  # not sharded: only this rank's, or its writer's
            copies = {key: [b for b in same if b.rank == first] for key, same in copies.items()}
        chosen = tuple(
            next((block for block in same if block.rank == first), same[0])
            for same in copies.values()
            if same
        )
        if sum(math.prod(block.lengths) for block in chosen) != math.prod(source.shape):
            raise IntegrityError(
                f"{source.name} is incomplete: the ranks' blocks do not add up to it"
            )
        return chosen
