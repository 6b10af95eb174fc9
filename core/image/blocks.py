"""Splits headers with several blocks of one tensor into headers with one block each, which is all that ``merge`` needs
to handle.

First blocks remain in the header of their rank. Further blocks go into additional headers with nothing else, under
virtual rank numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    PiecesNode,
    SequenceNode,
    TensorNode,
    positions_of,
    walk,
)


def split_blocks(headers: Mapping[int, ImageHeader]) -> dict[int, ImageHeader]:
    """Split headers so that each has at most one block of a tensor. ``rank_of`` maps virtual ranks to real ones."""
    found = dict(headers)
    if all(header.complete for header in headers.values()):
        return found
    count = max(headers) + 1
    for rank, header in headers.items():
        pieces = [node for node in walk(header.tree) if isinstance(node, PiecesNode)]
        names = {
            position: header.tensors[node.positions[0]].name
            for node in pieces
            for position in node.positions[1:]
        }
        tensors = tuple(
            replace(stored, name=names.get(position, stored.name))
            for position, stored in enumerate(header.tensors)
        )
        for number in range(1, max((len(node.positions) for node in pieces), default=0)):
            tree = _further(header.tree, number)
            assert isinstance(tree, MapNode), "a tree that is no mapping"
            found[rank + number * count] = replace(header, tensors=tensors, tree=tree, values=())
        found[rank] = replace(header, tree=replace_pieces(header.tree, _first))
    return found


def rank_of(rank: int, headers: Mapping[int, ImageHeader]) -> int:
    """The rank whose image has a block of a virtual rank; ``headers`` are the argument of ``split_blocks``."""
    return rank % (max(headers) + 1)


def present_tensors(header: ImageHeader) -> Sequence[StoredTensor]:
    """The tensors of the tree of a header that ``split_blocks`` returned."""
    if header.complete:
        return header.tensors
    return [header.tensors[position] for position in sorted(set(positions_of(header.tree)))]


def replace_pieces(tree: MapNode, change: Callable[[PiecesNode], Node]) -> MapNode:
    """The tree with each PiecesNode replaced by ``change(node)``, in order."""

    def changed(node: Node) -> Node:
        return change(node) if isinstance(node, PiecesNode) else node.map_children(changed)

    return tree.map_children(changed)


def _first(node: PiecesNode) -> Node:
    return TensorNode(node.positions[0]) if node.positions else node


def _further(node: Node, number: int) -> Node | None:
    """The part of the tree that has a block of this ``number``, or None. Sequences keep their length."""
    match node:
        case PiecesNode():
            return TensorNode(node.positions[number]) if number < len(node.positions) else None
        case MapNode():
            entries = [(k, _further(n, number)) for k, n in node.entries]
            kept = tuple((k, n) for k, n in entries if n is not None)
            return replace(node, entries=kept) if kept else None
        case ModuleNode():
            named = [(k, b, _further(n, number)) for k, b, n in node.entries]
            remaining = tuple((k, b, n) for k, b, n in named if n is not None)
            return replace(node, entries=remaining) if remaining else None
        case SequenceNode():
            nodes = [_further(n, number) for n in node.nodes]
            if all(n is None for n in nodes):
                return None
            return replace(node, nodes=tuple(PiecesNode(()) if n is None else n for n in nodes))
    return None
