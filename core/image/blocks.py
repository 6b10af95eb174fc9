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
)


def unfold(headers: Mapping[int, ImageHeader]) -> dict[int, ImageHeader]:
    """Give each header one block of a tensor at most; ``rank_of`` tells of whose image a made-up rank is."""
    found = dict(headers)
    if all(header.complete for header in headers.values()):
        return found
    count = max(headers) + 1
    for rank, header in headers.items():
        names = _base_names(header.tree, header)
        tensors = tuple(
            replace(stored, name=names.get(slot, stored.name))
            for slot, stored in enumerate(header.tensors)
        )
        for number in range(1, _deepest(header.tree)):
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


def _deepest(node: Node) -> int:
    """How many blocks of one tensor are below a node at most."""
    if isinstance(node, PiecesNode):
        return len(node.slots)
    return max((_deepest(child) for child in _children(node)), default=0)


def _children(node: Node) -> Sequence[Node]:
    match node:
        case MapNode():
            return [child for _, child in node.entries]
        case SequenceNode():
            return node.nodes
        case ModuleNode():
            return [child for _, _, child in node.entries]
    return ()


def with_pieces(tree: MapNode, change: Callable[[PiecesNode], Node]) -> MapNode:
    """The tree with something else in the place of each tensor of which there are any number of blocks, in order."""
    changed = _with_pieces(tree, change)
    assert isinstance(changed, MapNode), "a tree that is no mapping"
    return changed


def _with_pieces(node: Node, change: Callable[[PiecesNode], Node]) -> Node:
    match node:
        case PiecesNode():
            return change(node)
        case MapNode():
            entries = tuple((k, _with_pieces(n, change)) for k, n in node.entries)
            return replace(node, entries=entries)
        case SequenceNode():
            return replace(node, nodes=tuple(_with_pieces(n, change) for n in node.nodes))
        case ModuleNode():
            named = tuple((k, b, _with_pieces(n, change)) for k, b, n in node.entries)
            return replace(node, entries=named)
    return node


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


def _base_names(node: Node, header: ImageHeader) -> dict[int, str]:
    """By slot, the name of the tensor that each further block is of."""
    if isinstance(node, PiecesNode):
        return {slot: header.tensors[node.slots[0]].name for slot in node.slots[1:]}
    found: dict[int, str] = {}
    for child in _children(node):
        found.update(_base_names(child, header))
    return found
