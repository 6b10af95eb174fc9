"""The nodes of a tree: their children, names and replacement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierfall.core.image.tree import (
    CONTAINERS_AND_OBJECTS,
    CodecNode,
    ConflictNode,
    KeptNode,
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
    WrapperNode,
    leaves,
    positions_of,
    walk,
)

QUANTIZED = QuantizedNode(5, "torch.per_channel_affine", 0, SequenceNode(True, (TensorNode(6),)))
WRAPPER = WrapperNode("m:C", ("a", "b"), (TensorNode(9), QUANTIZED), ValueNode(3, ()))
OPTIMIZER = OptimizerNode(
    ("m.w", None),
    (((0, 1), ValueNode(0, ())),),
    ((0, MapNode("dict", (("step", TensorNode(1)),))), ((7,), ValueNode(1, (2,)))),
)
TREE = MapNode(
    "dict",
    (
        ("m", ModuleNode((("w", "w", TensorNode(0)), ("q", "q", QUANTIZED)))),
        ("empty", ModuleNode(())),
        ("opt", OPTIMIZER),
        (3, SequenceNode(False, (PiecesNode((3, 4)), ConflictNode("differs"), KeptNode()))),
        ("o", ObjectNode(MapNode("dict", (("t", CodecNode("mine", TensorNode(7))),)))),
        ("rng", RandomNode(ValueNode(2, (8,)))),
        ("w", WRAPPER),
    ),
)


def test_a_walk_meets_every_node_once_and_slots_are_found_in_the_order_of_the_tree() -> None:
    assert [position for position in positions_of(TREE)] == [0, 5, 6, 1, 2, 3, 4, 7, 8, 9, 5, 6]
    assert len([*walk(TREE)]) == 28


def test_leaves_are_what_is_restored_as_one() -> None:
    found = [name for name, _ in leaves(TREE, "")]
    assert found == [
        *("m.w", "m.q", "empty", "opt.param_groups.0", "opt.state.m.w.step", "opt.state.%i7"),
        *("%i3.0", "%i3.1", "%i3.2", "o", "rng", "w"),
    ]


def test_leaves_within_objects_keep_the_object_in_their_name() -> None:
    found = dict(leaves(TREE, "", CONTAINERS_AND_OBJECTS))
    assert found["o.t"] == TensorNode(7)
    assert found["rng"] == ValueNode(2, (8,))
    assert found["m.q"] is QUANTIZED


@pytest.mark.parametrize("node", [*walk(TREE)], ids=lambda node: type(node).__name__)
def test_a_node_has_as_many_names_as_children_and_is_made_of_them_again(node: Node) -> None:
    other = ValueNode(99, ())
    assert [child for _, child in node.named("x")] == [*node.children()]
    assert node.map_children(lambda child: child) == node
    changed = node.map_children(lambda child: other)
    assert [*changed.children()] == [other] * len(node.children())
    assert changed.own_positions() == node.own_positions()


def test_only_the_nodes_that_are_asked_for_change() -> None:
    def moved(node: Node) -> Node:
        if isinstance(node, TensorNode):
            return replace(node, position=node.position + 10)
        return node.map_children(moved)

    assert [*positions_of(moved(TREE))] == [10, 5, 16, 11, 2, 3, 4, 17, 8, 19, 5, 16]
