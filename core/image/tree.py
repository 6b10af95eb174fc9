"""The tree of a stored state, parsed from untrusted JSON into typed nodes.

Nodes refer to tensors by position, an index into the image's table of tensors, and to values by number. Parsing
validates every reference; any defect is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tierfall.core.tensors import names as naming
from tierfall.core.tensors import value_codec
from tierfall.core.tensors.value_codec import MAPPING_TYPES, Coded

# An object with a state_dict is one level of the walk, but two nodes.
_DEPTH_MAX = 3 * value_codec.DEPTH_MAX
SCHEMES = frozenset(
    {
        "torch.per_tensor_affine",
        "torch.per_channel_affine",
        "torch.per_channel_affine_float_qparams",
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree."""

    def own_positions(self) -> Sequence[int]:
        """The positions of the node's own tensors, without those of its children."""
        return ()

    def children(self) -> Sequence[Node]:
        """The nodes directly below this one, in order."""
        return ()

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        """The children with their names. ``name`` is this node's own, which the only child of an object shares."""
        return [(name, child) for child in self.children()]


@dataclass(frozen=True, slots=True)
class TensorNode(Node):
    position: int

    def own_positions(self) -> Sequence[int]:
        return (self.position,)


@dataclass(frozen=True, slots=True)
class ValueNode(Node):
    number: int
    blobs: tuple[int, ...]

    def own_positions(self) -> Sequence[int]:
        return self.blobs


@dataclass(frozen=True, slots=True)
class MapNode(Node):
    kind: str
    entries: tuple[tuple[Any, Node], ...]

    def children(self) -> Sequence[Node]:
        return [child for _, child in self.entries]

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        return [(naming.join(name, naming.component(key)), child) for key, child in self.entries]


@dataclass(frozen=True, slots=True)
class SequenceNode(Node):
    is_tuple: bool
    nodes: tuple[Node, ...]

    def children(self) -> Sequence[Node]:
        return self.nodes

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        return [(naming.join(name, str(index)), child) for index, child in enumerate(self.nodes)]


@dataclass(frozen=True, slots=True)
class ModuleNode(Node):
    """Entries are (key in the state_dict, name relative to the module, node)."""

    entries: tuple[tuple[str, str, Node], ...]

    def children(self) -> Sequence[Node]:
        return [child for _, _, child in self.entries]

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        return [(f"{name}.{below}", child) for _, below, child in self.entries]


@dataclass(frozen=True, slots=True)
class OptimizerNode(Node):
    """``state`` has nodes by a parameter's number, or by any other key in a 1-tuple."""

    names: tuple[str | None, ...]
    groups: tuple[tuple[tuple[int, ...], Node], ...]
    state: tuple[tuple[int | tuple[Any], Node], ...]

    def entry_name(self, key: int | tuple[Any]) -> str:
        """The name of an entry of the state, relative to ``<optimizer>.state``."""
        if isinstance(key, tuple):
            return naming.component(key[0])
        return self.names[key] or f"%i{key}"

    def children(self) -> Sequence[Node]:
        return [child for _, child in (*self.groups, *self.state)]

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        for index, (_, child) in enumerate(self.groups):
            yield f"{name}.param_groups.{index}", child
        for key, child in self.state:
            yield f"{name}.state.{self.entry_name(key)}", child


@dataclass(frozen=True, slots=True)
class _StateNode(Node):
    state: Node

    def children(self) -> Sequence[Node]:
        return (self.state,)


class ObjectNode(_StateNode):
    """An object with a state_dict."""

    __slots__ = ()


class RandomNode(_StateNode):
    """The random state of the process."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class QuantizedNode(Node):
    position: int
    scheme: str
    axis: int
    parameters: Node

    def own_positions(self) -> Sequence[int]:
        return (self.position,)

    def children(self) -> Sequence[Node]:
        return (self.parameters,)


@dataclass(frozen=True, slots=True)
class WrapperNode(Node):
    """A tensor of a class with ``__tensor_flatten__``: its inner tensors by attribute; ``shape`` is the value of its
    context, size and stride."""

    class_name: str
    attributes: tuple[str, ...]
    tensors: tuple[Node, ...]
    shape: ValueNode

    def children(self) -> Sequence[Node]:
        return (*self.tensors, self.shape)

    def named(self, name: str) -> Iterable[tuple[str, Node]]:
        names = [f"{name}%{attribute}" for attribute in (*self.attributes, "")]
        return zip(names, self.children(), strict=True)


TENSORS = TensorNode | QuantizedNode | WrapperNode
"""The nodes of one tensor."""


@dataclass(frozen=True, slots=True)
class CodecNode(_StateNode):
    """A value of a type that has a codec of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class PiecesNode(Node):
    """A sharded tensor of which an image has no block, or several; the images of all ranks together have all of it."""

    positions: tuple[int, ...]

    def own_positions(self) -> Sequence[int]:
        return self.positions


@dataclass(frozen=True, slots=True)
class ConflictNode(Node):
    """An entry in which the saving ranks differ; occurs only in merged headers. ``in_blocks``: their blocks of a tensor
    are no whole one, which only these ranks can restore."""

    reason: str
    in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class KeptNode(Node):
    """An entry that a restore leaves unchanged (``item(on_resize=...)``); occurs only in merged headers."""


CONTAINERS = frozenset({MapNode, SequenceNode, ModuleNode, OptimizerNode})
CONTAINERS_AND_OBJECTS = CONTAINERS | {ObjectNode, RandomNode, CodecNode}


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and all its descendants, parents first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children())


def positions_of(node: Node) -> Iterator[int]:
    """Yield the positions of a node and its descendants, possibly repeated."""
    for each in walk(node):
        yield from each.own_positions()


def leaves(
    node: Node, name: str, opened: frozenset[type[Node]] = CONTAINERS
) -> Iterator[tuple[str, Node]]:
    """Yield name and node of everything below ``node`` that is restored as a unit: tensors, values, objects.

    ``opened`` are the types that are replaced by their children; a module without entries is a leaf.
    """
    if type(node) not in opened or (type(node) is ModuleNode and not node.entries):
        yield name, node
        return
    for below, child in node.named(name):
        if type(child) in opened:
            yield from leaves(child, below, opened)
        else:
            yield below, child


def names_above(name: str) -> Iterator[str]:
    """Yield the names of all entries around that of a name."""
    for index, letter in enumerate(name):
        if letter == ".":
            yield name[:index]


class TreeReader:
    """Parses nodes for a table of ``tensors`` tensors and ``values`` values. Records which of them are used, and the
    values that are an optimizer's groups."""

    def __init__(self, tensors: int, values: int) -> None:
        self._tensors = tensors
        self._values = values
        self.used_positions: set[int] = set()
        self.used_values: set[int] = set()
        self.groups: list[ValueNode] = []
        self.in_pieces = False

    def read(self, data: Coded, depth: int = 0) -> Node:
        if depth > _DEPTH_MAX:
            raise ValueError("the tree is nested too deeply")
        if type(data) is int:
            return TensorNode(self._position(data))
        if not isinstance(data, list) or not data:
            raise ValueError("a node of the tree is neither a number nor a list")
        match data:
            case ["v", int(number), *blobs]:
                return ValueNode(self._value(number), tuple(map(self._position, blobs)))
            case ["d", str(kind), list(keys), list(nodes)] if kind in MAPPING_TYPES:
                return MapNode(kind, self._entries(keys, nodes, depth))
            case ["l" | "t" as kind, list(nodes)]:
                return SequenceNode(kind == "t", tuple(self.read(n, depth + 1) for n in nodes))
            case ["m", list(keys), list(names), list(nodes)]:
                return self._module(keys, names or keys, nodes, depth)
            case ["o", list(names), list(groups), list(state)]:
                return self._optimizer(names, groups, state, depth)
        return self._read_wrapper(data, depth)

    def _read_wrapper(self, data: list[Coded], depth: int) -> Node:
        match data:
            case ["p", list(positions)] if len(positions) != 1:
                self.in_pieces = True
                return PiecesNode(tuple(map(self._position, positions)))
            case ["s", child]:
                return ObjectNode(self.read(child, depth + 1))
            case ["q", position, str(scheme), int(axis), child] if scheme in SCHEMES:
                return QuantizedNode(
                    self._position(position), scheme, axis, self.read(child, depth + 1)
                )
            case ["w", str(class_name), list(attributes), [*nodes, shape]]:
                read = [self.read(node, depth + 1) for node in (*nodes, shape)]
                return _wrapper(class_name, attributes, read)
            case ["c", str(name), child]:
                return CodecNode(self.read(child, depth + 1), name)
            case ["r", child] if depth == 1:
                return RandomNode(self.read(child, depth + 1))
        raise ValueError(f"a node of the tree is of an unknown kind: {str(data[0])[:20]!r}")

    def _entries(
        self, keys: list[Coded], nodes: list[Coded], depth: int
    ) -> tuple[tuple[Any, Node], ...]:
        if len(keys) != len(nodes):
            raise ValueError("a mapping of the tree has not as many nodes as keys")
        read = [
            (_key(key), self.read(node, depth + 1)) for key, node in zip(keys, nodes, strict=True)
        ]
        if len({key for key, _ in read}) != len(read):
            raise ValueError("a mapping of the tree has a key twice")
        return tuple(read)

    def _module(
        self, keys: list[Coded], names: list[Coded], nodes: list[Coded], depth: int
    ) -> ModuleNode:
        if not len(keys) == len(names) == len(nodes):
            raise ValueError("a module of the tree has not as many nodes as keys")
        if not all(isinstance(text, str) for text in (*keys, *names)):
            raise ValueError("a key of a module is not a string")
        if names is keys:
            names = [naming.module_part(key) for key in keys]
        if len(set(keys)) != len(keys):
            raise ValueError("a module of the tree has a key twice")
        read = [self.read(node, depth + 1) for node in nodes]
        return ModuleNode(tuple(zip(keys, names, read, strict=True)))

    def _optimizer(
        self, names: list[Coded], groups: list[Coded], state: list[Coded], depth: int
    ) -> OptimizerNode:
        if not all(name is None or isinstance(name, str) for name in names):
            raise ValueError("the name of an optimizer's parameter is not a string")

        def number(value: Coded) -> int:
            if type(value) is not int or not 0 <= value < len(names):
                raise ValueError("an optimizer refers to a parameter that it does not have")
            return value

        read_groups = []
        for entry in groups:
            numbers, child = _pair(entry, list, object)
            group = self.read(child, depth + 1)
            if isinstance(group, ValueNode):
                self.groups.append(group)
            elif not isinstance(group, MapNode):
                raise ValueError("an optimizer's group is not a mapping")
            read_groups.append((tuple(map(number, numbers)), group))
        read_state: list[tuple[int | tuple[Any], Node]] = []
        for entry in state:
            key, child = _pair(entry, object, object)
            token = number(key) if type(key) is int else (_key(key),)
            read_state.append((token, self.read(child, depth + 1)))
        if len({key for key, _ in read_state}) != len(read_state):
            raise ValueError("an optimizer has the state of a parameter twice")
        if sum(len(numbers) for numbers, _ in read_groups) != len(names):
            raise ValueError("an optimizer's groups do not match its parameters")
        return OptimizerNode(tuple(names), tuple(read_groups), tuple(read_state))

    def _position(self, value: Coded) -> int:
        if type(value) is not int or not 0 <= value < self._tensors:
            raise ValueError("the tree refers to a tensor that is not in the table")
        self.used_positions.add(value)
        return value

    def _value(self, value: int) -> int:
        if not 0 <= value < self._values or value in self.used_values or type(value) is bool:
            raise ValueError(
                "the tree refers to a value that does not exist, or refers to it twice"
            )
        self.used_values.add(value)
        return value


def _wrapper(class_name: str, attributes: list[Coded], nodes: list[Node]) -> WrapperNode:
    *inner, shape = nodes
    if not all(isinstance(attribute, str) for attribute in attributes):
        raise ValueError("an attribute of a wrapper is not a string")
    if not len(set(attributes)) == len(attributes) == len(inner):
        raise ValueError("a wrapper has not as many tensors as attributes")
    if not isinstance(shape, ValueNode) or not all(isinstance(node, TENSORS) for node in inner):
        raise ValueError("a wrapper holds something else than tensors and a value")
    return WrapperNode(class_name, tuple(attributes), tuple(inner), shape)


def _key(data: Coded) -> Any:
    if isinstance(data, str):
        return data
    if not isinstance(data, list) or len(data) != 1:
        raise ValueError("a key of the tree is neither a string nor a list of one")
    return value_codec.decode_key(data[0])


def _pair(entry: Coded, first: type, second: type) -> tuple[Any, Any]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise ValueError("an entry of an optimizer is not a pair")
    if not isinstance(entry[0], first) or not isinstance(entry[1], second):
        raise ValueError("an entry of an optimizer is of a wrong type")
    return entry[0], entry[1]
