"""What a checkpoint holds, by the names that DCP gives it: flat, each with its path in the nested state.

DCP's names join keys by dots, as text, and take a list apart only where it holds tensors or mappings. So what
``Checkpointer.save`` wrote has such names too: a module's are its state_dict's, and an optimizer's are those of
``get_optimizer_state_dict``, by the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping
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
    """What stands under one name: a node, or, ``inside`` of its value, a part of it; without a node a ``value``."""

    path: Path
    node: Node | None
    inside: tuple[Any, ...] = ()
    value: object = None


class DcpEntries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """DCP's table of a checkpoint. Its objects are made when they are asked for, one at a time.

    Where ``merged`` may lack values that other ranks have alone, ``of_all`` merges the headers of all ranks: it is
    called once, when something else is asked for, or everything. ``merged`` and ``leaves`` are of these then.
    """

    def __init__(
        self, merged: MergedHeader, of_all: Callable[[], MergedHeader] | None = None
    ) -> None:
        self._of_all = of_all
        self._take(merged)

    def _take(self, merged: MergedHeader) -> None:
        self.merged = merged
        self.leaves: dict[str, Leaf] = {}
        for leaf in _Names(merged).below(merged.header.tree, ()):
            name = ".".join(map(str, leaf.path))
            if name in self.leaves:
                raise RestoreError(
                    f"dcp.load: two entries of {merged.header.what} are named {name!r} in DCP's way: use "
                    "Checkpointer.restore"
                )
            self.leaves[name] = leaf

    def _all(self) -> dict[str, Leaf]:
        if self._of_all is not None:
            merge, self._of_all = self._of_all, None
            self._take(merge())
        return self.leaves

    def leaf(self, name: str) -> Leaf:
        """What stands under a name; KeyError where nothing does."""
        return self.leaves[name] if name in self.leaves else self._all()[name]

    def __contains__(self, name: object) -> bool:
        return name in self.leaves or name in self._all()

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        node = self.leaf(name).node
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
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def keys(self) -> KeysView[str]:
        """The names that are known so far: by these DCP's planner tells whether a checkpoint has names as DCP gave them
        long ago, at every load."""
        return self.leaves.keys()


class Paths(Mapping[str, Path]):
    """Where each name stands in the nested state, as DCP's planners keep it."""

    def __init__(self, entries: DcpEntries) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Path:
        return self._entries.leaf(name).path

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
                return  # the process's own, which DCP has no name for
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
        """A parameter's name as its module has it; its number where it has none."""
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
    """Take a value apart as DCP does: mappings, and lists that hold some."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _inside(child, (*path, str(key)), node, (*inside, key))
    elif isinstance(value, list) and not _is_one(value):
        for index, child in enumerate(value):
            yield from _inside(child, (*path, index), node, (*inside, index))
    else:
        yield Leaf(path, node, inside)


def _is_one(value: object) -> bool:
    """Say whether DCP keeps a value as one, though it may hold others."""
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, list) or all(map(_is_one, value))
