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
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    PiecesNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
    slots_of,
)

PER_RANK = "per_rank"


class Pair(NamedTuple):
    """Tensors of one name, a rank's own and rank 0's, of which it is asked whether their bytes are the same."""

    own: StoredTensor
    first: StoredTensor


Differing = Callable[[int, Sequence[Pair]], frozenset[Pair]]
"""Tells which pairs of a rank differ in their bytes."""


def set_aside(
    headers: Mapping[int, ImageHeader], differing: Differing
) -> tuple[dict[int, ImageHeader], str]:
    """Return headers that are merged without loss, and the name below which the ranks' own entries stand then."""
    taken = {key for header in headers.values() for key, _ in header.tree.entries}
    name = PER_RANK
    while name in taken:
        name += "_"
    first = _First(headers[0])
    result = {0: headers[0]}
    for rank, header in headers.items():
        if rank == 0:
            continue
        asked = [(name_, node, first.pairs(header, name_, node)) for name_, node in _leaves(header)]
        other = differing(rank, [pair for _, _, pairs in asked for pair in pairs or ()])
        own = [
            (n, node) for n, node, pairs in asked if pairs is None or not other.isdisjoint(pairs)
        ]
        result[rank] = _with_own(header, name, rank, own) if own else header
    return result, name


def _leaves(header: ImageHeader) -> Iterator[tuple[str, Node]]:
    return leaves(header.tree, "")


class _First:
    """What rank 0 has, by name."""

    def __init__(self, header: ImageHeader) -> None:
        self._header = header
        self._leaves = dict(_leaves(header))
        self._above = {above for name in self._leaves for above in _above(name)}

    def pairs(self, header: ImageHeader, name: str, node: Node) -> list[Pair] | None:
        """Return what has to be equal for rank 0 to have the same; None where it is plain that it has not."""
        there = self._leaves.get(name)
        if isinstance(node, PiecesNode) or isinstance(there, PiecesNode):
            return []  # blocks of one tensor, of which one of them has none or several
        if there is None:
            covered = name in self._above or any(above in self._leaves for above in _above(name))
            return None if covered else []  # what rank 0 has nothing of is taken as it is
        own, first = list(_primitives(node, "")), list(_primitives(there, ""))
        if [n for n, _ in own] != [n for n, _ in first]:
            return None
        pairs = []
        for (_, one), (_, other) in zip(own, first, strict=True):
            if not self._alike(header, one, other):
                return None
            slots = zip(slots_of(one), slots_of(other), strict=True)
            pairs += [Pair(header.tensors[a], self._header.tensors[b]) for a, b in slots]
        if any(map(_is_of_another_shape, pairs)):
            return None
        return [pair for pair in pairs if _is_asked(pair)]

    def _alike(self, header: ImageHeader, one: Node, other: Node) -> bool:
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


def _is_asked(pair: Pair) -> bool:
    """Blocks of one tensor differ as they should, and what another rank writes is the same."""
    own, first = pair
    return not _is_cut(pair) and own.length > 0 and _has_bytes(own) and _has_bytes(first)


def _is_cut(pair: Pair) -> bool:
    return pair.own.piece is not None or pair.first.piece is not None


def _is_of_another_shape(pair: Pair) -> bool:
    """Say whether two whole tensors cannot be one."""
    own, first = pair
    return not _is_cut(pair) and (own.dtype, own.shape) != (first.dtype, first.shape)


def _has_bytes(stored: StoredTensor) -> bool:
    """Say whether an image has the bytes of a tensor that it names."""
    return stored.written_by is None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _above(name: str) -> Iterator[str]:
    for index, letter in enumerate(name):
        if letter == ".":
            yield name[:index]


def _primitives(node: Node, name: str) -> Iterator[tuple[str, Node]]:
    """Yield the tensors and values that a node is made of, with names that tell where."""
    for below, leaf in leaves(node, name):
        match leaf:
            case ObjectNode() | RandomNode():
                yield from _primitives(leaf.state, f"{below}.s")
            case CodecNode():
                yield from _primitives(leaf.value, f"{below}.{leaf.name}")
            case QuantizedNode():
                yield f"{below}.{leaf.scheme}.{leaf.axis}", TensorNode(leaf.slot)
                yield from _primitives(leaf.parameters, f"{below}.q")
            case _:
                yield below, leaf


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
        _put(root, name, _moved(node, moved))
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


def _moved(node: Node, slots: Mapping[int, int]) -> Node:
    """Return a node whose tensors lie at other places of the table."""

    def move(child: Node) -> Node:
        return _moved(child, slots)

    match node:
        case TensorNode():
            return TensorNode(slots[node.slot])
        case ValueNode():
            return replace(node, blobs=tuple(slots[blob] for blob in node.blobs))
        case QuantizedNode():
            return replace(node, slot=slots[node.slot], parameters=move(node.parameters))
        case ObjectNode() | RandomNode():
            return replace(node, state=move(node.state))
        case CodecNode():
            return replace(node, value=move(node.value))
    return _moved_container(node, move)


def _moved_container(node: Node, move: Callable[[Node], Node]) -> Node:
    match node:
        case MapNode():
            return replace(node, entries=tuple((k, move(child)) for k, child in node.entries))
        case SequenceNode():
            return replace(node, nodes=tuple(map(move, node.nodes)))
        case ModuleNode():
            return replace(node, entries=tuple((k, n, move(child)) for k, n, child in node.entries))
        case OptimizerNode():
            return replace(
                node,
                groups=tuple((numbers, move(child)) for numbers, child in node.groups),
                state=tuple((key, move(child)) for key, child in node.state),
            )
    raise AssertionError(f"no image holds {node}")
