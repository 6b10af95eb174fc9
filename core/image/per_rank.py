"""Separates entries in which a rank differs from rank 0, before the headers are merged, so that none is lost.

A merged checkpoint has one value per name, rank 0's. Another rank's different value of that name (its random state, a
counter) moves to ``per_rank.<rank>.<name>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import (
    CodecNode,
    MapNode,
    Node,
    PiecesNode,
    QuantizedNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    leaves,
    names_above,
    positions_of,
    walk,
)

PER_RANK = "per_rank"


class TensorPair(NamedTuple):
    """Two tensors of one name, a rank's own and rank 0's, whose bytes are to be compared."""

    own: StoredTensor
    first: StoredTensor


Differing = Callable[[int, Sequence[TensorPair]], frozenset[TensorPair]]
"""Returns the pairs of a rank whose bytes differ."""


def separate_per_rank(
    headers: Mapping[int, ImageHeader], differing: Differing
) -> tuple[dict[int, ImageHeader], str]:
    """Return headers that can be merged without loss, and the name of the entry with the ranks' own values."""
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
            if own.length > 0 and own.written_by is None and first.written_by is None:
                found.append(TensorPair(own, first))
        return found


def _form(header: ImageHeader, node: Node) -> list[Any]:
    """The structure of a leaf, and its values: equal on two ranks if at most the bytes of tensors differ."""
    form: list[Any] = []
    for each in walk(node):
        own: Any = None
        match each:
            case ValueNode():
                own = json.dumps(header.values[each.number], sort_keys=True)
            case CodecNode():
                own = each.name
            case WrapperNode():
                own = each.class_name
            case QuantizedNode():
                own = each.scheme, each.axis
        names = [name for name, _ in each.named("")]
        form.append((type(each), own, names, len(each.own_positions())))
    return form


# Moving entries --------------------------------------------------------------------------------------


def _with_own(
    header: ImageHeader, key: str, rank: int, own: Sequence[tuple[str, Node]]
) -> ImageHeader:
    """The header with these entries also below ``key``, their tensors under new names."""
    tensors = list(header.tensors)
    moved: dict[int, int] = {}
    for position in sorted({position for _, node in own for position in positions_of(node)}):
        stored = header.tensors[position]
        if stored.written_by is not None:
            moved[position] = position  # another rank writes it, under this name
            continue
        moved[position] = len(tensors)
        tensors.append(replace(stored, name=f"{key}.{rank}.{stored.name}", piece=None))
    root: dict[str, Any] = {}
    for name, node in own:
        _insert(root, name, _reindexed(node, moved))
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


def _reindexed(part: Any, positions: Mapping[int, int]) -> Any:
    """A part of a tree with its tensors at other positions."""
    match part:
        case TensorNode():
            return TensorNode(positions[part.position])
        case ValueNode():
            return replace(part, blobs=tuple(positions[blob] for blob in part.blobs))
        case PiecesNode():
            return PiecesNode(tuple(positions[position] for position in part.positions))
        case QuantizedNode():
            part = replace(part, position=positions[part.position])
    if type(part) is tuple:
        return tuple(_reindexed(each, positions) for each in part)
    if not isinstance(part, Node):
        return part
    inside = {each.name: getattr(part, each.name) for each in fields(part)}
    return replace(part, **{name: _reindexed(each, positions) for name, each in inside.items()})
