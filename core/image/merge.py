"""Merges the headers of all ranks: every tensor whole, with its blocks in the ranks' images.

The ranks' trees are merged by keys and names of mappings, modules and optimizers, so that pipeline stages form one
tree. A value or an unsharded tensor should be equal on all ranks that have it. Otherwise the rank ``own`` has
precedence; without ``own`` the entry becomes a conflict, which is reported when the entry is requested.

A rank's image may have several blocks of one tensor. They count as those of other ranks do, by the name of the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.layout import part_name
from tierfall.core.image.tree import (
    ConflictNode,
    KeptNode,
    MapNode,
    ModuleNode,
    Node,
    OptimizerNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    positions_of,
    walk,
)
from tierfall.core.state.item import OnResize
from tierfall.core.tensors import names as naming
from tierfall.core.tensors import value_codec
from tierfall.core.tensors.dtensor import find_overlap
from tierfall.core.tensors.dtypes import byte_count
from tierfall.core.tensors.value_codec import MAPPING_TYPES, Coded
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.text import format_ranks

NOBODY = -1
_INSIDE = "%"  # the name of nodes that no ``item`` can wrap


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlock:
    """A block of a tensor in one rank's image: bytes ``start`` to ``end`` of that image's data, with the block's offset
    and lengths in the whole tensor."""

    rank: int
    start: int
    end: int
    offset: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedHeader:
    """``header`` describes whole tensors with virtual byte ranges. ``blocks`` has the blocks of each tensor, by
    position. ``replicas``, by position, has further copies whose bytes must be equal for the merge to be right."""

    header: ImageHeader
    blocks: Sequence[tuple[TensorBlock, ...]]
    replicas: Mapping[int, tuple[tuple[TensorBlock, ...], ...]]


Tables = Mapping[int, Mapping[str, StoredTensor]]
"""The tensors of ranks' images, by name."""


def table_of(header: ImageHeader) -> dict[str, StoredTensor]:
    """Return the tensors whose bytes are in an image, by name."""
    return {stored.name: stored for stored in header.tensors if not stored.writers}


def find_blocks(
    stored: StoredTensor, rank: int, tables: Tables, offset: tuple[int, ...]
) -> tuple[TensorBlock, ...]:
    """Return the blocks of a tensor of the image of ``rank``, which begins at ``offset``: in that image, or in those of
    the ranks that write it.

    Raises IntegrityError if one of these does not have it: no memory is allocated for a tensor that is only claimed.
    """
    found, start, size = [], 0, stored.dtype.itemsize
    whole = ((stored.writers or (rank,))[0], stored.length)
    for number, (writer, end) in enumerate(stored.parts or (whole,)):
        expected, inside = stored, [((0,) * len(stored.shape), stored.shape)]
        if stored.parts:
            name, shape = part_name(stored.name, number), ((end - start) // size,)
            expected = StoredTensor(name, stored.dtype, shape, start, end)
            inside = [*boxes(stored.shape, start // size, end // size)]
        there = tables.get(writer, {}).get(expected.name) if stored.writers else stored
        if there is None or there.kind != expected.kind:
            raise IntegrityError(
                f"{stored.name} is not there: rank {writer} was to write it for rank {rank}"
            )
        start, at = end, there.start
        for low, lengths in inside:
            block = TensorBlock(
                rank=writer,
                start=at,
                end=at + byte_count(stored.dtype, lengths),
                offset=tuple(map(operator.add, offset, low)),
                lengths=lengths,
            )
            found.append(block)
            at = block.end
    return tuple(found)


def boxes(
    shape: Sequence[int], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the blocks, each as offset and lengths, that the elements ``start`` to ``end`` of a tensor consist of, in
    their order: whole rows, and of the first and the last row what is in them."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while start < end:
        first, inside = divmod(start, row)
        rows = 0 if inside else (end - start) // row
        if rows:
            yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row
            continue
        stop = min(row, inside + end - start)
        for offset, lengths in boxes(shape[1:], inside, stop):
            yield (first, *offset), (1, *lengths)
        start += stop - inside


def merge_headers(
    headers: Mapping[int, ImageHeader],
    *,
    what: str,
    own: int | None,
    rank: int = 0,
    rules: Mapping[str, OnResize] | None = None,
    of_state: bool = False,
) -> MergedHeader:
    """Merge the headers of all ranks. ``own`` is the rank that has precedence where they differ. Without one, ``rules``
    are the ``on_resize`` rules by name, applied for ``rank``. ``of_state``: the state of ``own`` is to be restored. A
    mapping in which some rank had no tensors gets sharded tensors of other ranks, and nothing else of them."""
    merger = _Merger(headers, own, rank, (rules or {}) if own is None else {}, of_state)
    return merger.merge(what)


def _names_of(header: ImageHeader) -> Sequence[str]:
    """The names of a header's tensors. All blocks of one tensor have the name of the first."""
    found = [stored.name for stored in header.tensors]
    for node in () if header.complete else walk(header.tree):
        if isinstance(node, PiecesNode):
            for position in node.positions[1:]:
                found[position] = found[node.positions[0]]
    return found


def _blocks_of(holders: Mapping[int, Sequence[StoredTensor]]) -> list[tuple[int, StoredTensor]]:
    """Every block, with its rank."""
    return [(rank, stored) for rank, blocks in holders.items() for stored in blocks]


def _own_blobs(coded: Coded, blobs: Sequence[int], found: list[int]) -> Coded:
    """A part of a value whose blobs are numbered anew; ``found`` gets their positions."""
    if isinstance(coded, list):
        return [_own_blobs(each, blobs, found) for each in coded]
    if not isinstance(coded, dict):
        return coded
    if coded.get(value_codec.TAG) == "blob":
        found.append(blobs[coded["t"]])
        return {**coded, "t": len(found) - 1}
    return {key: _own_blobs(each, blobs, found) for key, each in coded.items()}


class _Conflict(Exception):
    """Ranks differ; the arguments are those of ``ConflictNode``."""


class _Merger:
    def __init__(
        self,
        headers: Mapping[int, ImageHeader],
        own: int | None,
        rank: int,
        rules: Mapping[str, OnResize],
        of_state: bool,
    ) -> None:
        self._headers = headers
        self._of_state = of_state
        self._rank = rank
        self._rules = rules
        self._source_rank: dict[int, int] = {}
        self._own = NOBODY if own is None else own
        self._positions: dict[str, int] = {}
        self._names = {rank: _names_of(header) for rank, header in headers.items()}
        self._tables = {rank: table_of(header) for rank, header in headers.items()}
        self._holders: list[dict[int, list[StoredTensor]]] = []
        """By position, each rank's blocks of a tensor."""
        self._coded = {rank: [*header.values] for rank, header in headers.items()}
        self._values: list[Coded] = []

    def merge(self, what: str) -> MergedHeader:
        for rank, names in self._names.items():
            header, own_parts = self._headers[rank], self._headers[rank].own_parts
            for at, (name, stored) in enumerate(zip(names, header.tensors, strict=True)):
                if at in own_parts:
                    continue
                position = self._positions.setdefault(name, len(self._positions))
                if position == len(self._holders):
                    self._holders.append({})
                self._holders[position].setdefault(rank, []).append(stored)
        roots = {rank: header.tree for rank, header in self._headers.items()}
        tree = self._node(roots, "", top=True)
        assert isinstance(tree, MapNode), "a tree that is no mapping"
        wholes, blocks, replicas, end = [], [], {}, 0
        for position in range(len(self._holders)):
            whole, parts, others = self._whole(self._holders_of(position), end)
            end = whole.end
            wholes.append(whole)
            blocks.append(parts)
            if others:
                replicas[position] = others
        types: dict[str, str] = {}
        for header in self._headers.values():
            types = {**header.types, **types}
        header = ImageHeader(
            what=what,
            data_start=0,
            data_bytes=end,
            tensors=tuple(wholes),
            tree=tree,
            values=tuple(self._values),
            types=types,
            merged=True,
        )
        return MergedHeader(header=header, blocks=tuple(blocks), replicas=replicas)

    # ---- tensors

    def _whole(
        self, holders: Mapping[int, Sequence[StoredTensor]], start: int
    ) -> tuple[StoredTensor, tuple[TensorBlock, ...], tuple[tuple[TensorBlock, ...], ...]]:
        """A whole tensor, the blocks to read, and further copies that must equal them."""
        own = holders.get(self._own, ())
        first = own[0] if own else next(iter(holders.values()))[0]
        shape = first.whole_shape
        whole = StoredTensor(
            first.name,
            first.dtype,
            shape,
            start,
            start + byte_count(first.dtype, shape),
            strides=first.strides if first.piece is None else None,
        )
        found: dict[tuple[Any, Any], dict[tuple[TensorBlock, ...], None]] = {}
        preferred: list[tuple[TensorBlock, ...]] = []
        known: dict[Any, tuple[TensorBlock, ...]] = {}
        for rank, stored in _blocks_of(holders):
            offset = (0,) * len(shape) if stored.piece is None else stored.piece.offset
            if stored.length or not whole.length:
                key = (
                    stored.name,
                    stored.dtype,
                    offset,
                    stored.shape,
                    stored.writers,
                    stored.parts,
                )
                copy = known.get(key) or find_blocks(stored, rank, self._tables, offset)
                known |= {key: copy} if stored.writers else {}
                found.setdefault((offset, stored.shape), {})[copy] = None
                preferred += [copy] if rank == self._own else []
        # The copy of the rank with precedence, wherever that is written; else any.
        chosen = [
            next((copy for copy in copies if copy in preferred), next(iter(copies)))
            for copies in found.values()
        ]
        blocks = tuple(block for copy in chosen for block in copy)
        # No comparison: ``own`` has precedence, other shapes are a conflict.
        if self._own in holders or (first.piece is None and len(found) != 1):
            return whole, blocks, ()
        copies = chain.from_iterable(found.values())
        return whole, blocks, tuple(copy for copy in copies if copy not in chosen)

    def _holders_of(self, position: int) -> Mapping[int, Sequence[StoredTensor]]:
        """The ranks that have a tensor. Of an unsharded one, only the rank with precedence, and its writer."""
        holders = self._holders[position]
        source = self._source_rank.get(position)
        is_whole = all(stored.piece is None for _, stored in _blocks_of(holders))
        if source is None and self._own in holders and is_whole:
            source = self._own
        if source is None:
            return holders
        ranks = (source, *(writer for stored in holders[source] for writer in stored.writers))
        return {rank: holders[rank] for rank in ranks if rank in holders}

    def _position(self, positions: Mapping[int, int]) -> int:
        """The merged position of one tensor, from its position on each rank."""
        names = {self._names[rank][position] for rank, position in positions.items()}
        if len(names) > 1:
            raise _Conflict(f"is tied to other tensors on some ranks: {', '.join(sorted(names))}")
        position = self._positions[names.pop()]
        self._check_same_whole(self._holders_of(position))
        return position

    def _check_same_whole(self, holders: Mapping[int, Sequence[StoredTensor]]) -> None:
        found = _blocks_of(holders)
        first_rank, first = found[0]
        whole = first.whole_shape
        for rank, stored in found:
            shape = stored.whole_shape
            is_sharded = (stored.piece is None) != (first.piece is None)
            if is_sharded or shape != whole or stored.dtype is not first.dtype:
                one, other = ("" if s.piece is None else ", in blocks," for s in (first, stored))
                raise _Conflict(
                    f"is {first.dtype} {whole}{one} on rank {first_rank} and {stored.dtype} {shape}{other} on rank "
                    f"{rank}"
                )
        blocks = {stored.piece: rank for rank, stored in found if stored.piece is not None}
        if overlap := find_overlap([*blocks]):
            one, other = (f"{piece} on rank {blocks[piece]}" for piece in overlap)
            raise _Conflict(f"has blocks that overlap: {one}, and {other}", True)
        elements = sum(math.prod(piece.lengths) for piece in blocks)
        if first.piece is not None and elements != math.prod(whole):
            raise _Conflict(
                "is incomplete: the blocks of the ranks do not add up to the whole tensor, but to "
                f"{elements} of its {math.prod(whole)} elements",
                True,
            )

    # ---- the tree

    def _node(self, nodes: Mapping[int, Node], name: str, *, top: bool = False) -> Node:
        if name in self._rules:
            return self._by_rule(nodes, self._rules[name])
        nodes = {
            r: TensorNode(n.positions[0]) if isinstance(n, PiecesNode) and n.positions else n
            for r, n in nodes.items()
        }
        # A rank without a block of a tensor does not know its kind; others do.
        nodes = {r: n for r, n in nodes.items() if not isinstance(n, PiecesNode)} or nodes
        if any(isinstance(node, MapNode) for node in nodes.values()):
            if self._of_state and self._own in nodes and len({*map(type, nodes.values())}) > 1:
                others = {r: self._sharded(r, n) for r, n in nodes.items() if r != self._own}
                nodes = {self._own: nodes[self._own], **others}
            nodes = {rank: self._opened(rank, node) for rank, node in nodes.items()}
        kinds = {type(node) for node in nodes.values()}
        if kinds == {PiecesNode}:
            return PiecesNode(())
        if self._own in nodes and len(kinds) > 1:
            nodes = {self._own: nodes[self._own]}
        elif len(kinds) > 1:
            found = ", ".join(f"{type(n).__name__} on rank {r}" for r, n in list(nodes.items())[:4])
            return ConflictNode(f"is not of one kind: {found}")
        try:
            return self._same_kind(nodes, name, top)
        except _Conflict as conflict:
            return ConflictNode(*conflict.args)

    def _sharded(self, rank: int, node: Node) -> Node:
        """Of a mapping the entries with sharded tensors."""
        entries = node.entries if isinstance(node, MapNode) else ()
        tensors = self._headers[rank].tensors
        return MapNode(
            "dict", tuple(e for e in entries if any(tensors[at].piece for at in positions_of(e[1])))
        )

    def _opened(self, rank: int, node: Node) -> Node:
        """A mapping of plain values entry by entry, since other ranks have tensors in it."""
        values, entries = self._coded[rank], []
        match values[node.number] if isinstance(node, ValueNode) else None:
            case {value_codec.TAG: str(kind), "v": [*pairs]} if kind in MAPPING_TYPES:
                pass
            case dict() as plain if value_codec.TAG not in plain:
                kind, pairs = "dict", [*plain.items()]
            case _:
                return node
        for key, value in pairs:
            blobs: list[int] = []
            values.append(_own_blobs(value, node.own_positions(), blobs))
            entries.append((value_codec.decode_key(key), ValueNode(len(values) - 1, tuple(blobs))))
        return MapNode(kind, tuple(entries))

    def _by_rule(self, nodes: Mapping[int, Node], rule: OnResize) -> Node:
        """One rank's entry, whatever the others have; or a KeptNode, which leaves the live entry unchanged."""
        rank = min(nodes) if rule is OnResize.REPLICATE else self._rank
        if rule is OnResize.DROP or rank not in nodes:
            return KeptNode()
        for position in positions_of(nodes[rank]):
            self._source_rank[self._positions[self._names[rank][position]]] = rank
        rules, self._rules = self._rules, {}
        try:
            return self._node({rank: nodes[rank]}, "")
        finally:
            self._rules = rules

    def _same_kind(self, nodes: Mapping[int, Any], name: str, top: bool) -> Node:
        first = next(iter(nodes.values()))
        match first:
            case TensorNode():
                return TensorNode(
                    self._position({rank: node.position for rank, node in nodes.items()})
                )
            case ValueNode():
                return self._value(nodes)
            case MapNode():
                return self._mapping(nodes, name, top)
            case SequenceNode():
                return self._sequence(nodes, name)
            case ModuleNode():
                keys = {name: key for node in nodes.values() for key, name, _ in node.entries}
                entries = {r: {name: n for _, name, n in x.entries} for r, x in nodes.items()}
                merged = self._union(entries, lambda below: f"{name}.{below}")
                return ModuleNode(tuple((keys[name], name, node) for name, node in merged.items()))
            case OptimizerNode():
                return self._optimizer(nodes)
            case QuantizedNode():
                return replace(
                    first,
                    position=self._position({rank: node.position for rank, node in nodes.items()}),
                    parameters=self._inside({r: n.parameters for r, n in nodes.items()}),
                )
            case WrapperNode():
                return self._wrapper(nodes)
        whole: Node = replace(first, state=self._inside({r: n.state for r, n in nodes.items()}))
        return whole

    def _wrapper(self, nodes: Mapping[int, WrapperNode]) -> Node:
        if self._own in nodes:
            nodes = {self._own: nodes[self._own]}
        first = next(iter(nodes.values()))
        found = {(node.class_name, node.attributes) for node in nodes.values()}
        if len(found) > 1:
            names = ", ".join(sorted({name for name, _ in found}))
            raise _Conflict(
                f"is of other classes, or has other inner tensors, on some ranks: {names}"
            )
        tensors = tuple(
            self._inside({rank: node.tensors[index] for rank, node in nodes.items()})
            for index in range(len(first.tensors))
        )
        shape = self._inside({rank: node.shape for rank, node in nodes.items()})
        assert isinstance(shape, ValueNode)
        return replace(first, tensors=tensors, shape=shape)

    def _inside(self, nodes: Mapping[int, Node]) -> Node:
        """Merge what is restored as a unit: a conflict anywhere in it is a conflict of the whole."""
        merged = self._node(nodes, _INSIDE)
        for node in walk(merged):
            if isinstance(node, ConflictNode):
                raise _Conflict(node.reason, node.in_blocks)
        return merged

    def _union(
        self, entries: Mapping[int, Mapping[Any, Node]], name_of: Callable[[Any], str]
    ) -> dict[Any, Node]:
        keys = dict.fromkeys(key for mapping in entries.values() for key in mapping)
        return {
            key: self._node({rank: m[key] for rank, m in entries.items() if key in m}, name_of(key))
            for key in keys
        }

    def _mapping(self, nodes: Mapping[int, MapNode], name: str, top: bool) -> Node:
        entries = {rank: dict(node.entries) for rank, node in nodes.items()}
        if top and self._own == NOBODY:
            # The old ranks' random states have no meaning for another number of ranks.
            entries = {
                rank: {k: n for k, n in mapping.items() if not isinstance(n, RandomNode)}
                for rank, mapping in entries.items()
            }
        kind = next(iter(nodes.values())).kind
        merged = self._union(entries, lambda key: naming.join(name, naming.component(key)))
        return MapNode(kind, tuple(merged.items()))

    def _sequence(self, nodes: Mapping[int, SequenceNode], name: str) -> Node:
        if len({(node.is_tuple, len(node.nodes)) for node in nodes.values()}) > 1:
            raise _Conflict("is a sequence whose length or type differs between ranks")
        first = next(iter(nodes.values()))
        return SequenceNode(
            first.is_tuple,
            tuple(
                self._node(
                    {rank: node.nodes[index] for rank, node in nodes.items()}, f"{name}.{index}"
                )
                for index in range(len(first.nodes))
            ),
        )

    def _value(self, nodes: Mapping[int, ValueNode]) -> Node:
        coded = {rank: self._coded[rank][node.number] for rank, node in nodes.items()}
        if self._own in nodes:
            nodes = {self._own: nodes[self._own]}
        elif any(value != next(iter(coded.values())) for value in coded.values()):
            groups: dict[str, list[int]] = {}
            for rank, value in coded.items():
                groups.setdefault(repr(value)[:40], []).append(rank)
            found = "; ".join(
                f"{text} on {format_ranks(r)}" for text, r in list(groups.items())[:3]
            )
            raise _Conflict(f"differs between the ranks that saved it: {found}")
        rank, first = next(iter(nodes.items()))
        self._values.append(self._coded[rank][first.number])
        blobs = tuple(
            self._position({r: node.blobs[index] for r, node in nodes.items()})
            for index in range(len(first.blobs))
        )
        return ValueNode(len(self._values) - 1, blobs)

    def _optimizer(self, nodes: Mapping[int, OptimizerNode]) -> Node:
        if (
            any(None in node.names for node in nodes.values())
            or len({len(node.groups) for node in nodes.values()}) > 1
        ):
            same = {(node.names, tuple(n for n, _ in node.groups)) for node in nodes.values()}
            if len(same) > 1:
                raise _Conflict("has parameters without names, which differ between ranks")
        names = dict.fromkeys(name for node in nodes.values() for name in node.names)
        if None in names:
            first = next(iter(nodes.values()))
            number_of = {r: list(range(len(first.names))) for r in nodes}
            all_names = first.names
        else:
            numbers = {name: number for number, name in enumerate(names)}
            number_of = {r: [numbers[n] for n in node.names] for r, node in nodes.items()}
            all_names = tuple(names)
        groups = []
        for index in range(len(next(iter(nodes.values())).groups)):
            members = dict.fromkeys(
                number_of[rank][n] for rank, node in nodes.items() for n in node.groups[index][0]
            )
            child = self._inside({rank: node.groups[index][1] for rank, node in nodes.items()})
            groups.append((tuple(members), child))
        state = self._union(
            {
                rank: {number_of[rank][k] if isinstance(k, int) else k: n for k, n in node.state}
                for rank, node in nodes.items()
            },
            lambda key: _INSIDE,
        )
        return OptimizerNode(all_names, tuple(groups), tuple(state.items()))
