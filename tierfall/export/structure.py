"""Parts of a state, as ``--only`` names them, and the structure by which ``tierfall import`` brings an exported state
back exactly, and without a pickle. All of it is found in the header of an image: no tensor is read.

A whole step as safetensors is an image of one rank. A file of torch.save and a DCP folder, which hold pickled objects,
carry an image beside these: of the tree, the values, and the tensors that are parts of values. It lists all other
tensors as written elsewhere; its entry ``PLACES`` has the names under which the file or folder has these, and
``WRITTEN_WITH`` the digest of a folder's ``.metadata``: another program may save into the folder later.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierfall.core.format.documents import dumps
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.image.tree import (
    CONTAINERS_AND_OBJECTS,
    CodecNode,
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    QuantizedNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    leaves,
    positions_of,
)
from tierfall.core.state.view import NO_OWNER, StateView
from tierfall.core.tensors import names, value_codec
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import Changes

CARRIED = "tierfall.safetensors"
"""The name of the image in a DCP folder, and in the zip file that torch.save writes."""
PLACES = "tierfall.places"
WRITTEN_WITH = "tierfall.written_with"

Entries = Sequence[tuple[Any, Node]]
"""The top of a tree: nodes by key."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One entry of a state and everything below it; ``name`` is dotted, and empty for the whole state."""

    name: str
    node: Node


def select(header: ImageHeader, only: Sequence[str]) -> tuple[StatePart, ...]:
    """Return the parts that ``only`` names, or the whole state if it is empty.

    Raises ConfigError for an unknown name; the message lists the known ones.
    """
    parts = []
    for name in only:
        node = _find(header.tree, name)
        if node is None:
            there = ", ".join(names.component(key) for key, _ in header.tree.entries)
            raise ConfigError(
                f"--only {name!r}: the checkpoint has no part of that name; expected one of {there}, or, with dots, "
                "a name below"
            )
        parts.append(StatePart(name, node))
    for part in parts:
        if any(names.is_within(part.name, other.name) for other in parts if other is not part):
            raise ConfigError(f"--only {part.name!r}: it is named twice, or is within another")
    return tuple(parts) or (StatePart("", header.tree),)


def _find(node: Node, name: str) -> Node | None:
    """Return the node at a dotted name below a node."""
    match node:
        case ModuleNode():
            return _find_in_module(node, name)
        case ObjectNode() | RandomNode():
            return _find(node.state, name)
        case MapNode() | SequenceNode():
            for key, child in node.named(""):
                if name == key:
                    return child
                if names.is_within(name, key):
                    return _find(child, name.removeprefix(f"{key}."))
    return None


def _find_in_module(node: ModuleNode, name: str) -> Node | None:
    """The names of a module's entries contain dots: those below a prefix form a state of their own."""
    for _, below, child in node.entries:
        if below == name:
            return child
    inner = tuple(
        (below.removeprefix(f"{name}."), below.removeprefix(f"{name}."), child)
        for _, below, child in node.entries
        if names.is_within(below, name)
    )
    return ModuleNode(inner) if inner else None


def tensors_of(header: ImageHeader, part: StatePart, *, full_names: bool) -> dict[str, int]:
    """Return the tensors of a part by name, each with its index in the image's table; a tied tensor has several names.

    ``full_names`` keeps the name of the part as a prefix.
    """
    found: dict[str, int] = {}
    for below, leaf in leaves(part.node, part.name, CONTAINERS_AND_OBJECTS):
        for position in positions_of(leaf):
            name = below if isinstance(leaf, TensorNode) else header.tensors[position].name
            short = name if full_names or not part.name else name.removeprefix(f"{part.name}.")
            if short == part.name:  # the part is this tensor
                short = short.rpartition(".")[2]
            if found.setdefault(short, position) != position:
                raise ConfigError(
                    f"export: two tensors would be named {short!r}; use --format torch"
                )
    return found


def values_of(part: StatePart) -> list[str]:
    """Return the names of values that are not stored as tensors: numbers, short text, None."""
    return [
        name
        for name, leaf in leaves(part.node, part.name, CONTAINERS_AND_OBJECTS)
        if isinstance(leaf, ValueNode) and not leaf.blobs
    ]


def entries_of(parts: Sequence[StatePart]) -> Entries:
    """Return parts as the entries of a state: a single one is named by the last component of its name."""
    if isinstance(whole := parts[0].node, MapNode) and not parts[0].name:
        return whole.entries
    if len(parts) == 1:
        return [(parts[0].name.rpartition(".")[2], parts[0].node)]
    return [(part.name, part.node) for part in parts]


class Structure:
    """Entries of a header's tree as a state of their own. ``positions`` are the tensors that they use, in the order of
    ``view().names``."""

    def __init__(self, header: ImageHeader, entries: Entries) -> None:
        self._header = header
        self._tree = MapNode("dict", tuple(entries))
        self._numbers: dict[int, int] = {}
        self._values: list[Any] = []
        self._keys = [key for key, _ in entries]
        self._nodes = [
            ("r", self._node(node.state)) if isinstance(node, RandomNode) else self._node(node)
            for _, node in entries
        ]

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self._numbers)

    def add_value(self, key: str, value: Any) -> None:
        """Add an entry with a plain value."""
        self._keys.append(key)
        self._nodes.append(("v", len(self._values)))
        self._values.append(value)

    def view(self, sources: Sequence[torch.Tensor] = ()) -> StateView:
        """Return the state as a walk would; ``sources`` are its tensors, in the order of ``positions``."""
        tensors = [self._header.tensors[position] for position in self._numbers]
        count = len(tensors)
        return StateView(
            names=self._names(),
            sources=list(sources),
            pointers=array("Q"),
            changes=(Changes.ANYTIME,) * count,
            owners=(NO_OWNER,) * count,
            trails=(None,) * count,
            plain=(False,) * count,
            strides=tuple(t.strides for t in tensors),
            parameters={},
            optimizers=(),
            tree=("d", "dict", tuple(map(_key, self._keys)), tuple(self._nodes)),
            dtypes=tuple(t.dtype for t in tensors),
            shapes=tuple(t.shape for t in tensors),
            block_positions=tuple(t.piece for t in tensors),
            values=self._values,
            rules={},
            types=self._types(),
            structure=(),
        )

    def _names(self) -> tuple[str, ...]:
        """Return the names of the tensors: those of the tree, and, of parts of values, those that they had."""
        found: dict[int, str] = {}
        for name, leaf in leaves(self._tree, "", CONTAINERS_AND_OBJECTS):
            if isinstance(leaf, TensorNode):
                found.setdefault(leaf.position, name)
        return tuple(found.get(p, self._header.tensors[p].name) for p in self._numbers)

    def _types(self) -> dict[str, str]:
        tops = [names.component(key) for key in self._keys]
        types = (self._header.types or {}).items()
        return {n: kind for n, kind in types if any(names.is_within(n, top) for top in tops)}

    def _number(self, position: int) -> int:
        return self._numbers.setdefault(position, len(self._numbers))

    def _node(self, node: Node) -> Any:
        """Return a node in the form that a walk gives it."""
        match node:
            case TensorNode():
                return self._number(node.position)
            case ValueNode():
                self._values.append(self._header.values[node.number])
                return ("v", len(self._values) - 1, *map(self._number, node.blobs))
            case OptimizerNode():
                groups = [(numbers, self._node(child)) for numbers, child in node.groups]
                state = [
                    (k if isinstance(k, int) else (_key(k[0]),), self._node(child))
                    for k, child in node.state
                ]
                return ("o", node.names, tuple(groups), tuple(state))
            case QuantizedNode():
                number = self._number(node.position)
                return ("q", number, node.scheme, node.axis, self._node(node.parameters))
        return self._container(node)

    def _container(self, node: Node) -> Any:
        nodes = tuple(map(self._node, node.children()))
        match node:
            case MapNode():
                return ("d", node.kind, tuple(_key(key) for key, _ in node.entries), nodes)
            case SequenceNode():
                return ("t" if node.is_tuple else "l", nodes)
            case ModuleNode():
                keys, below = (tuple(entry[at] for entry in node.entries) for at in (0, 1))
                return ("m", keys, below, nodes)
            case WrapperNode():
                return ("w", node.class_name, node.attributes, nodes)
            case CodecNode():
                return ("c", node.name, *nodes)
            case ObjectNode():
                return ("s", *nodes)
            case RandomNode():  # another rank's, below per_rank
                return nodes[0]
        raise AssertionError(f"a state has no {node}")


def plan_carried(
    structure: Structure, place_of: Mapping[int, str], written_with: str | None
) -> tuple[Layout, StateView]:
    """Return layout and view of the image that a file or folder carries; ``place_of`` has the names there of tensors,
    by position, and ``written_with`` is the digest of a folder's metadata."""
    numbers = [n for n, position in enumerate(structure.positions) if position in place_of]
    structure.add_value(PLACES, [place_of[structure.positions[n]] for n in numbers])
    if written_with is not None:
        structure.add_value(WRITTEN_WITH, written_with)
    view = structure.view()
    return plan_layout(view, dict.fromkeys(numbers, 0)), view


def _key(key: Any) -> str | tuple[str]:
    return key if type(key) is str else (dumps(value_codec.encode_atom(key)).decode("ascii"),)
