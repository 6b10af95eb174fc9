"""Images that hold several blocks of one tensor, as headers of which each holds one: so that ``merging`` need know one.

The first blocks stay in the header of their rank; each further block of a tensor goes into a header of its own that
holds nothing else, under the number of a rank that does not exist.
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
    slots_of,
    walk,
)


def unfold(headers: Mapping[int, ImageHeader]) -> dict[int, ImageHeader]:
    """Give each header one block of a tensor at most; ``rank_of`` tells of whose image a made-up rank is."""
    found = dict(headers)
    if all(header.complete for header in headers.values()):
        return found
    count = max(headers) + 1
    for rank, header in headers.items():
        pieces = [node for node in walk(header.tree) if isinstance(node, PiecesNode)]
        names = {
            slot: header.tensors[node.slots[0]].name for node in pieces for slot in node.slots[1:]
        }
        tensors = tuple(
            replace(stored, name=names.get(slot, stored.name))
            for slot, stored in enumerate(header.tensors)
        )
        for number in range(1, max((len(node.slots) for node in pieces), default=0)):
            tree = _further(header.tree, number)
            assert isinstance(tree, MapNode), "a tree that is no mapping"
            found[rank + number * count] = replace(header, tensors=tensors, tree=tree, values=())
        found[rank] = replace(header, tree=with_pieces(header.tree, _first))
    return found


def rank_of(rank: int, headers: Mapping[int, ImageHeader]) -> int:
    """Return the rank whose image a block is in; ``headers`` are as they were given to ``unfold``."""
    return rank % (max(headers) + 1)


def held(header: ImageHeader) -> Sequence[StoredTensor]:
    """Return the tensors that an unfolded header is about."""
    if header.complete:
        return header.tensors
    return [header.tensors[slot] for slot in sorted(set(slots_of(header.tree)))]


def with_pieces(tree: MapNode, change: Callable[[PiecesNode], Node]) -> MapNode:
    """The tree with something else in the place of each tensor of which there are any number of blocks, in order."""

    def changed(node: Node) -> Node:
        return change(node) if isinstance(node, PiecesNode) else node.map_children(changed)

    return tree.map_children(changed)


def _first(node: PiecesNode) -> Node:
    """The first block of a tensor."""
    return TensorNode(node.slots[0]) if node.slots else node


def _further(node: Node, number: int) -> Node | None:
    """What of the tree has a further block: None where nothing has. Places in a sequence stay."""
    match node:
        case PiecesNode():
            return TensorNode(node.slots[number]) if number < len(node.slots) else None
        case MapNode():
            entries = [(k, _further(n, number)) for k, n in node.entries]
            left = tuple((k, n) for k, n in entries if n is not None)
            return replace(node, entries=left) if left else None
        case ModuleNode():
            named = [(k, b, _further(n, number)) for k, b, n in node.entries]
            kept = tuple((k, b, n) for k, b, n in named if n is not None)
            return replace(node, entries=kept) if kept else None
        case SequenceNode():
            nodes = [_further(n, number) for n in node.nodes]
            if all(n is None for n in nodes):
                return None
            return replace(node, nodes=tuple(PiecesNode(()) if n is None else n for n in nodes))
    return None
