"""Assignment of reads: each chunk that is needed is read once, by a rank that sees it on the fastest tier, in equal
shares; and it comes to each node once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.ranks.messages import NumberRanges
from tierfall.core.ranks.topology import Topology
from tierfall.core.restore.assign import (
    RankGroup,
    assign,
    sender_of,
    takers_of,
)


@st.composite
def jobs(draw: Any) -> tuple[list[int], list[RankGroup], dict[int, Any]]:
    """The node of each rank, what groups need, and who sees which image where."""
    count, images = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    nodes = [draw(st.integers(0, 2)) for _ in range(count)]
    ranks = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(
        lambda x: tuple(sorted(x))
    )
    member_of = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
    groups = []
    for number in sorted(set(member_of)):
        chunks = {
            image: NumberRanges.of(draw(st.lists(st.integers(1, 9), min_size=1, unique=True)))
            for image in draw(st.lists(st.integers(0, images - 1), unique=True))
        }
        members = NumberRanges.of(rank for rank in range(count) if member_of[rank] == number)
        groups.append(RankGroup(ranks=members, chunks=chunks))
    holders = {}
    for image in range(images):
        tiers = draw(st.lists(st.tuples(st.integers(0, 2), ranks), min_size=1, max_size=3))
        holders[image] = sorted(dict(tiers).items())
    return nodes, groups, holders


def needs_of(groups: list[RankGroup], rank: int) -> set[tuple[int, int]]:
    return {
        (image, index)
        for one in groups
        if rank in one.ranks
        for image, chunks in one.chunks.items()
        for index in chunks
    }


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_every_chunk_that_is_needed_has_one_owner_that_sees_it_on_the_fastest_tier(
    job: Any,
) -> None:
    nodes, groups, holders = job
    items = assign(groups, holders)
    assert items.keys() == set().union(*(needs_of(groups, rank) for rank in range(len(nodes))))
    for chunk, item in items.items():
        fastest = holders[chunk[0]][0][1]
        needing = {r for r in range(len(nodes)) if chunk in needs_of(groups, r)}
        assert item.owner in fastest
        assert item.owner in needing or not needing & set(fastest)


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_each_rank_that_needs_a_chunk_takes_it_from_one_other_and_each_node_gets_it_once(
    job: Any,
) -> None:
    nodes, groups, holders = job
    views = [Topology.of(rank, nodes) for rank in range(len(nodes))]
    items = assign(groups, holders)
    for chunk, item in items.items():
        needing = {r for r in range(len(nodes)) if chunk in needs_of(groups, r)}
        given = {r: takers_of(chunk, item, groups, views[r]) for r in range(len(nodes))}
        for rank in needing:
            way = [rank]
            while way[-1] != item.owner:
                way.append(sender_of(chunk, item, groups, views[way[-1]]))
                assert way[-2] in given[way[-1]]
                assert way[-1] not in way[:-1]
        crossing = [
            (nodes[r], nodes[to]) for r in given for to in given[r] if nodes[to] != nodes[r]
        ]
        senders, receivers = zip(*crossing, strict=True) if crossing else ((), ())
        assert len(receivers) == len(set(receivers)), "each node receives a chunk once"
        assert len(senders) == len(set(senders)), "and sends it once"
        assert set().union(*given.values()) == needing, "nobody else is sent it"


@settings(max_examples=40, deadline=None)
@given(job=jobs(), order=st.randoms())
def test_all_ranks_come_to_the_same(job: Any, order: Any) -> None:
    _, groups, holders = job
    shuffled = list(holders.items())
    order.shuffle(shuffled)
    again = [
        RankGroup(ranks=g.ranks, chunks=dict(reversed(list(g.chunks.items())))) for g in groups
    ]
    assert assign(again, dict(shuffled)) == assign(groups, holders)
