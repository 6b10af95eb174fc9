"""The tree of ranks reaches each rank once, is shallow, and no rank has many neighbours."""

from __future__ import annotations

import pytest

from tierfall.core.ranks.topology import ALONE, FAN_OUT, Topology


def nodes_of(nodes: int, ranks_each: int) -> list[int]:
    return [rank // ranks_each for rank in range(nodes * ranks_each)]


SHAPES = {
    "one rank": ([0], FAN_OUT),
    "one node": (nodes_of(1, 8), FAN_OUT),
    "20 nodes": (nodes_of(20, 8), FAN_OUT),
    "20 nodes, two branches": (nodes_of(20, 8), 2),
    "40 nodes in a line": (nodes_of(40, 1), 1),
    "150 nodes": (nodes_of(150, 8), FAN_OUT),
    "interleaved": ([0, 1, 0, 1], FAN_OUT),
    "of unequal size": ([*"baccadbbb"], 2),
}


@pytest.fixture(params=SHAPES, scope="module")
def trees(request: pytest.FixtureRequest) -> list[Topology]:
    """The topology as each rank of a shape sees it."""
    node_of, fan_out = SHAPES[request.param]
    first = Topology.of(0, node_of, fan_out=fan_out)
    return [Topology(rank, first.nodes, fan_out) for rank in range(len(node_of))]


def test_each_rank_is_reached_exactly_once(trees: list[Topology]) -> None:
    reached = [0]
    for rank in reached:
        reached.extend(trees[rank].children)
    assert sorted(reached) == list(range(len(trees)))


def test_no_rank_has_more_leaders_below_it_than_the_fan_out(trees: list[Topology]) -> None:
    for tree in trees:
        far = set(tree.children) - set(tree.local_ranks)
        assert len(far) <= tree.fan_out
        assert far <= set(tree.leaders)
        assert tree.is_leader or not tree.children


def test_interleaved_ranks_are_grouped_by_their_node() -> None:
    trees = [Topology.of(rank, ["left", "right", "left", "right"]) for rank in range(4)]
    assert trees[0].nodes == ((0, 2), (1, 3))
    assert [tree.parent for tree in trees] == [None, 0, 0, 1]
    assert [tree.local_ranks for tree in trees] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert Topology.of(0, ["here"]) == ALONE
