"""Parts of a state, as ``--only`` names them, and the names of their tensors in an export.

Everything is found in the header of an image: nothing here reads tensors or accesses a tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    CONTAINERS_AND_OBJECTS,
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
    positions_of,
)
from tierfall.core.tensors import names
from tierfall.core.types.errors import ConfigError


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
    for name, position in _named(header, part.name, part.node):
        short = name if full_names or not part.name else name.removeprefix(f"{part.name}.")
        if short == part.name:  # the part is this tensor
            short = short.rpartition(".")[2]
        if found.setdefault(short, position) != position:
            raise ConfigError(f"export: two tensors would be named {short!r}; use --format torch")
    return found


def _named(header: ImageHeader, name: str, node: Node) -> Iterator[tuple[str, int]]:
    for below, leaf in leaves(node, name, CONTAINERS_AND_OBJECTS):
        if isinstance(leaf, TensorNode):
            yield below, leaf.position
        else:
            yield from (
                (header.tensors[position].name, position) for position in positions_of(leaf)
            )


def values_of(part: StatePart) -> list[str]:
    """Return the names of values that are not stored as tensors: numbers, short text, None."""
    return [
        name
        for name, leaf in leaves(part.node, part.name, CONTAINERS_AND_OBJECTS)
        if isinstance(leaf, ValueNode) and not leaf.blobs
    ]
