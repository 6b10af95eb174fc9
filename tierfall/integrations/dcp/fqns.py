"""The entries of a checkpoint under DCP's flat names (FQNs), each with its path in the nested state.

DCP joins keys by dots, and flattens a list only if it contains tensors or mappings. Entries that ``Checkpointer.save``
wrote get such names, too: those of a module are the keys of its state_dict, those of an optimizer are the ones of
``get_optimizer_state_dict``, by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfall.core.image.merge import MergedHeader
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    ObjectNode,
    OptimizerNode,
    RandomNode,
    SequenceNode,
    TensorNode,
    ValueNode,
    leaves,
)
from tierfall.core.load.choices import plain_value
from tierfall.core.tensors import names
from tierfall.core.types.errors import RestoreError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """The entry under one name: a node; a part of its value, at the keys ``inside``; or, without a node, a
    ``value``."""

    path: Path
    node: Node | None
    inside: tuple[Any, ...] = ()
    value: object = None


class DcpEntries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """DCP's metadata of a checkpoint. Its objects are created on access, one at a time."""

    def __init__(self, merged: MergedHeader) -> None:
        self.merged = merged
        self.leaves: dict[str, Leaf] = {}
        for leaf in _Names(merged).below(merged.header.tree, ()):
            name = ".".join(map(str, leaf.path))
            if name in self.leaves:
                raise RestoreError(
                    f"dcp.load: two entries of {merged.header.what} have the same name {name!r} in DCP: use "
                    "Checkpointer.restore"
                )
            self.leaves[name] = leaf

    def __contains__(self, name: object) -> bool:
        return name in self.leaves

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        node = self.leaves[name].node
        if not isinstance(node, TensorNode):
            return BytesStorageMetadata()
        stored = self.merged.header.tensors[node.position]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=stored.dtype),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.lengths))
                for block in self.merged.blocks[node.position]
            ],
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


class Paths(Mapping[str, Path]):
    """The path of each name in the nested state, for DCP's planners."""

    def __init__(self, entries: DcpEntries) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Path:
        return self._entries.leaves[name].path

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Names:
    """Walks the tree of a checkpoint."""

    def __init__(self, merged: MergedHeader) -> None:
        self._header = merged.header
        named = leaves(merged.header.tree, "", frozenset({MapNode}))
        self._modules = tuple(name for name, node in named if isinstance(node, ModuleNode))

    def below(self, node: Node, path: Path) -> Iterator[Leaf]:
        match node:
            case MapNode() | ModuleNode() | SequenceNode(is_tuple=False):
                for key, child in _children(node):
                    yield from self.below(child, (*path, key))
            case OptimizerNode():
                yield from self._optimizer(node, path)
            case ObjectNode():
                yield from self.below(node.state, path)
            case ValueNode():
                yield from _inside(plain_value(self._header, node), path, node, ())
            case RandomNode():
                return  # the random state of the process has no name in DCP
            case _:
                yield Leaf(path, node)

    def _optimizer(self, node: OptimizerNode, path: Path) -> Iterator[Leaf]:
        for key, child in node.state:
            part = self._parameter(node, key) if isinstance(key, int) else str(key[0])
            yield from self.below(child, (*path, "state", part))
        for index, (numbers, child) in enumerate(node.groups):
            group = (*path, "param_groups", index)
            yield from self.below(child, group)
            members = [self._parameter(node, number) for number in numbers]
            yield Leaf((*group, "params"), None, value=members)

    def _parameter(self, node: OptimizerNode, number: int) -> str:
        """Return a parameter's name relative to its module; its number if it has no name."""
        name = node.names[number]
        if name is None:
            return str(number)
        within = next((m for m in self._modules if names.is_within(name, m)), None)
        return name if within is None else name.removeprefix(f"{within}.")


def _children(node: MapNode | ModuleNode | SequenceNode) -> list[tuple[str | int, Node]]:
    match node:
        case MapNode():
            return [(str(key), child) for key, child in node.entries]
        case ModuleNode():
            return [(key, child) for key, _, child in node.entries]
    return list(enumerate(node.nodes))


def _inside(value: Any, path: Path, node: Node, inside: tuple[Any, ...]) -> Iterator[Leaf]:
    """Flatten a value as DCP does: mappings, and lists that contain mappings."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _inside(child, (*path, str(key)), node, (*inside, key))
    elif isinstance(value, list) and not _is_leaf(value):
        for index, child in enumerate(value):
            yield from _inside(child, (*path, index), node, (*inside, index))
    else:
        yield Leaf(path, node, inside)


def _is_leaf(value: object) -> bool:
    """Return whether DCP does not flatten a value, though it may be a list."""
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(map(_is_leaf, value))
