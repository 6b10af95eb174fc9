"""Assignment of reads: each wanted byte is read once, by a rank that has it on the fastest tier, in equal shares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.load.build import Fill
from tierfall.core.restore.exchange.assign import (
    ChunkAssignment,
    RankGroup,
    RequestedRanges,
    UnassignedError,
    assign,
    deliveries_to,
    reads_of,
    receivers_of,
    requested_ranges,
)

CHUNK = 10


def fill(start: int, end: int) -> Fill:
    return Fill(start=start, end=end, targets=(torch.empty(end - start),))


def group(*ranks: int, **requested: tuple[int, ...]) -> RankGroup:
    """``group(0, 1, i3=(0, 25))``: ranks 0 and 1 want bytes 0 to 25 of rank 3's image."""
    return RankGroup(
        ranks=ranks,
        requested={int(i[1:]): RequestedRanges(CHUNK, runs) for i, runs in requested.items()},
    )


def readers(items: list[ChunkAssignment]) -> dict[tuple[int, int], int]:
    return {(item.image, item.chunk): item.reader for item in items}


def test_what_a_rank_failed_to_read_another_one_reads_and_then_the_slower_tier() -> None:
    holders = {0: [(1, (0, 1)), (2, (2,))]}
    groups = [group(0, 1, 2, i0=(0, 20))]
    chosen = readers(assign(groups, holders, {(0, 1, 0)}))
    assert chosen[0, 1] == 1
    assert readers(assign(groups, holders, {(0, 1, 0), (0, 1, 1)}))[0, 1] == 2
    with pytest.raises(UnassignedError, match="chunk 1 of rank 0's image"):
        assign(groups, holders, {(0, 1, rank) for rank in range(3)})
    with pytest.raises(UnassignedError):
        assign(groups, {})


worlds = st.integers(1, 5)


@st.composite
def jobs(draw: Any) -> tuple[int, list[RankGroup], dict[int, Any], set[tuple[int, int, int]]]:
    count, images = draw(worlds), draw(st.integers(1, 4))
    ranks = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted)
    owners = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
    groups = []
    for number in sorted(set(owners)):
        requested = {}
        for image in draw(st.lists(st.integers(0, images - 1), unique=True)):
            cuts = draw(st.lists(st.integers(0, 60), max_size=6).map(sorted))
            spans = [fill(a, b) for a, b in itertools.pairwise(cuts)][::2]
            requested[image] = requested_ranges(spans, CHUNK)
        members = tuple(rank for rank in range(count) if owners[rank] == number)
        groups.append(RankGroup(ranks=members, requested=requested))
    holders = {}
    for image in range(images):
        tiers = draw(st.lists(st.tuples(st.integers(0, 2), ranks), min_size=1, max_size=3))
        slowest = (3, tuple(range(count)))
        holders[image] = [*sorted(dict(tiers).items()), slowest]
    excluded = draw(
        st.sets(
            st.tuples(st.integers(0, images - 1), st.integers(1, 6), st.integers(1, count)),
            max_size=8,
        )
    )  # rank 0 is always left
    return count, groups, holders, excluded


@settings(max_examples=30, deadline=None)
@given(job=jobs())
def test_every_wanted_byte_comes_to_whoever_wants_it_from_one_reader(job: Any) -> None:
    count, groups, holders, excluded = job
    items = assign(groups, holders, excluded)
    assert len(readers(items)) == len(items), "no chunk is read twice"
    for item in items:
        able = [
            (tier, [r for r in ranks if (item.image, item.chunk, r) not in excluded])
            for tier, ranks in holders[item.image]
        ]
        fastest = next(ranks for _, ranks in able if ranks)
        wanting = {r for span in item.spans for r in groups[span.group].ranks}
        assert item.reader in fastest
        assert item.reader in wanting or not wanting & set(fastest)
    for rank in range(count):
        own = reads_of(items, rank)
        assert [item.number for item in own] == list(range(len(own)))
        requested = {i: w for g in groups if rank in g.ranks for i, w in g.requested.items()}
        wanted = {
            (image, at)
            for image, want in requested.items()
            for low, high in zip(want.edges[::2], want.edges[1::2], strict=True)
            for at in range(low, high)
        }
        got = [
            (get.item.image, at)
            for get in deliveries_to(items, groups, rank, count)
            for at in range(get.low, get.high)
        ]
        kept = [
            (item.image, at)
            for item in own
            for span in item.spans
            if rank in groups[span.group].ranks
            for at in range(span.low, span.high)
        ]
        assert sorted(got + kept) == sorted(wanted)


@settings(max_examples=30, deadline=None)
@given(job=jobs())
def test_what_is_sent_is_what_is_awaited_and_no_rank_waits_for_a_later_one_first(job: Any) -> None:
    count, groups, holders, excluded = job
    items = assign(groups, holders, excluded)
    sent = {
        (item.image, item.chunk, item.reader, rank, low, high)
        for item in items
        for rank, low, high in receivers_of(item, groups)
    }
    awaited = set()
    for rank in range(count):
        gets = deliveries_to(items, groups, rank, count)
        numbers = [get.item.number for get in gets]
        assert numbers == sorted(numbers), "what all read first comes first: none waits in a circle"
        awaited |= {(g.item.image, g.item.chunk, g.item.reader, rank, g.low, g.high) for g in gets}
    assert sent == awaited


@settings(max_examples=30, deadline=None)
@given(job=jobs(), order=st.randoms())
def test_all_ranks_come_to_the_same(job: Any, order: Any) -> None:
    _, groups, holders, excluded = job
    shuffled = list(holders.items())
    order.shuffle(shuffled)
    again = [
        RankGroup(ranks=g.ranks, requested=dict(reversed(list(g.requested.items()))))
        for g in groups
    ]
    assert assign(again, dict(shuffled), set(excluded)) == assign(groups, holders, excluded)
