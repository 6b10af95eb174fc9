"""What single ranks have otherwise than rank 0, set aside before their headers are merged: nothing of it is lost.

A merged checkpoint has one value of each name, rank 0's. What another rank has under that name and is not the same
(its random state, a counter of its own) comes to stand below ``per_rank.<rank>``, under its name there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import (
    CodecNode,
    MapNode,
    Node,
    ObjectNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    TensorNode,
    ValueNode,
    leaves,
    slots_of,
)

PER_RANK = "per_rank"


class TensorPair(NamedTuple):
    """Tensors of one name, a rank's own and rank 0's, of which it is asked whether their bytes are the same."""

    own: StoredTensor
    first: StoredTensor


Differing = Callable[[int, Sequence[TensorPair]], frozenset[TensorPair]]
"""Tells which pairs of a rank differ in their bytes."""


def set_aside(
    headers: Mapping[int, ImageHeader], differing: Differing
) -> tuple[dict[int, ImageHeader], str]:
    """Return headers that are merged without loss, and the name below which the ranks' own entries stand then."""
    taken = {key for header in headers.values() for key, _ in header.tree.entries}
    name = PER_RANK
    while name in taken:
        name += "_"
    first = _FirstRank(headers[0])
    result = {0: headers[0]}
    for rank, header in headers.items():
        if rank == 0:
            continue
        asked = [
            (name_, node, first.pairs(header, name_, node))
            for name_, node in leaves(header.tree, "")
        ]
        other = differing(rank, [pair for _, _, pairs in asked for pair in pairs or ()])
        own = [
            (n, node) for n, node, pairs in asked if pairs is None or not other.isdisjoint(pairs)
        ]
        result[rank] = _with_own(header, name, rank, own) if own else header
    return result, name


class _FirstRank:
    """What rank 0 has, by name."""

    def __init__(self, header: ImageHeader) -> None:
        self._header = header
        self._leaves = dict(leaves(header.tree, ""))
        self._above = {above for name in self._leaves for above in _parent_name(name)}

    def pairs(self, header: ImageHeader, name: str, node: Node) -> list[TensorPair] | None:
        """Return what has to be equal for rank 0 to have the same; None where it is plain that it has not."""
        there = self._leaves.get(name)
        if isinstance(node, PiecesNode) or isinstance(there, PiecesNode):
            return []  # blocks of one tensor, of which one of them has none or several
        if there is None:
            covered = name in self._above or any(
                above in self._leaves for above in _parent_name(name)
            )
            return None if covered else []  # what rank 0 has nothing of is taken as it is
        own, first = list(_primitives(node, "")), list(_primitives(there, ""))
        if [n for n, _ in own] != [n for n, _ in first]:
            return None
        pairs = []
        for (_, one), (_, other) in zip(own, first, strict=True):
            if not self._is_equal(header, one, other):
                return None
            slots = zip(slots_of(one), slots_of(other), strict=True)
            pairs += [TensorPair(header.tensors[a], self._header.tensors[b]) for a, b in slots]
        if any(map(_is_of_another_shape, pairs)):
            return None
        return [pair for pair in pairs if _must_compare(pair)]

    def _is_equal(self, header: ImageHeader, one: Node, other: Node) -> bool:
        """Say whether two nodes are the same but for the bytes of their tensors. What differs between tensors
        themselves is a conflict, which merging names."""
        if type(one) is not type(other):
            return False
        if not isinstance(one, ValueNode) or not isinstance(other, ValueNode):
            return True
        blobs = [(header.tensors[slot].dtype, header.tensors[slot].shape) for slot in one.blobs]
        there = [self._header.tensors[slot] for slot in other.blobs]
        return blobs == [(t.dtype, t.shape) for t in there] and _text(
            header.values[one.number]
        ) == _text(self._header.values[other.number])


def _must_compare(pair: TensorPair) -> bool:
    """Blocks of one tensor differ as they should, and what another rank writes is the same."""
    own, first = pair
    return not _is_cut(pair) and own.length > 0 and _has_bytes(own) and _has_bytes(first)


def _is_cut(pair: TensorPair) -> bool:
    return pair.own.piece is not None or pair.first.piece is not None


def _is_of_another_shape(pair: TensorPair) -> bool:
    """Say whether two whole tensors cannot be one."""
    own, first = pair
    return not _is_cut(pair) and (own.dtype, own.shape) != (first.dtype, first.shape)


def _has_bytes(stored: StoredTensor) -> bool:
    """Say whether an image has the bytes of a tensor that it names."""
    return stored.written_by is None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _parent_name(name: str) -> Iterator[str]:
    for index, letter in enumerate(name):
        if letter == ".":
            yield name[:index]


def _primitives(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    """Yield the tensors and values that a node is made of, with names that tell where."""
    match node:
        case ObjectNode() | RandomNode():
            name = f"{name}.s"
        case CodecNode():
            name = f"{name}.{node.name}"
        case QuantizedNode():
            name = f"{name}.{node.scheme}.{node.axis}"
            yield name, TensorNode(node.slot)
    if not node.children():
        yield name, node
    for below, child in node.named(name):
        yield from _primitives(child, below)


# Setting aside ---------------------------------------------------------------------------------------


def _with_own(
    header: ImageHeader, key: str, rank: int, own: Sequence[tuple[str, Node]]
) -> ImageHeader:
    """Return the header with these entries below ``key`` too, their tensors under names of their own."""
    tensors = list(header.tensors)
    moved: dict[int, int] = {}
    for slot in sorted({slot for _, node in own for slot in slots_of(node)}):
        stored = header.tensors[slot]
        if not _has_bytes(stored):
            moved[slot] = slot  # another rank has them, under the name that it has here
            continue
        moved[slot] = len(tensors)
        tensors.append(replace(stored, name=f"{key}.{rank}.{stored.name}", piece=None))
    root: dict[str, Any] = {}
    for name, node in own:
        _put(root, name, _reindexed(node, moved))
    entry = (key, MapNode("dict", ((str(rank), _tree(root)),)))
    tree = replace(header.tree, entries=(*header.tree.entries, entry))
    return replace(header, tensors=tuple(tensors), tree=tree)


def _put(root: dict[str, Any], name: str, node: Node) -> None:
    *folders, last = name.split(".")
    at: Any = root
    for folder in folders:
        at = at.setdefault(folder, {})
        if not isinstance(at, dict):  # a module's key that is the beginning of another one
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


def _reindexed(node: Node, slots: Mapping[int, int]) -> Node:
    """Return a node whose tensors lie at other places of the table."""
    match node:
        case TensorNode():
            return TensorNode(slots[node.slot])
        case ValueNode():
            return replace(node, blobs=tuple(slots[blob] for blob in node.blobs))
        case PiecesNode():
            return PiecesNode(tuple(slots[slot] for slot in node.slots))
        case QuantizedNode():
            node = replace(node, slot=slots[node.slot])
    return node.map_children(lambda child: _reindexed(child, slots))
