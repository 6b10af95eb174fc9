"""Placement of copies in other nodes' memory: no two in one failure domain, no node with more than its share, and what
the loss of nodes costs, counted one by one."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfall.policies.placement import CopyPlacement, place_copies


def alone(nodes: int) -> list[str]:
    """Each node is a failure domain of its own."""
    return [f"n{node}" for node in range(nodes)]


@given(st.data())
def test_every_node_keeps_as_many_images_as_it_has_copies_elsewhere(data: st.DataObject) -> None:
    domains = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40))
    copies = data.draw(st.integers(1, min(5, len(domains) - 1)))
    placed = place_copies(domains, copies)
    for node, holders in enumerate(placed.holders):
        assert holders[0] == node
        assert len(set(holders)) == copies + 1
    kept = Counter(holder for holders in placed.holders for holder in holders[1:])
    assert [kept[node] for node in range(len(domains))] == [copies] * len(domains)


@given(st.data())
def test_no_two_holders_share_a_domain_where_that_is_possible(data: st.DataObject) -> None:
    """It is possible as long as no domain has more than its share: of the nodes, one of ``copies`` + 1."""
    domains = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40))
    copies = data.draw(st.integers(1, min(5, len(domains) - 1)))
    placed = place_copies(domains, copies)
    crowded = [
        node
        for node, holders in enumerate(placed.holders)
        if len({domains[each] for each in holders}) <= copies
    ]
    assert list(placed.crowded) == crowded
    possible = max(Counter(domains).values()) * (copies + 1) <= len(domains)
    assert not crowded or not possible


def test_racks_of_four_keep_images_in_other_racks() -> None:
    racks = [f"rack{node // 4}" for node in range(16)]
    placed = place_copies(racks, 1)
    assert not placed.crowded
    assert all(racks[one] != racks[other] for one, other in placed.holders)


@pytest.mark.parametrize(("nodes", "copies"), [(1, 1), (4, 4), (4, 0), (2, 7)])
def test_copies_that_do_not_fit_are_refused(nodes: int, copies: int) -> None:
    with pytest.raises(ValueError, match=f"{copies} copies on other nodes, and {nodes} nodes"):
        place_copies(alone(nodes), copies)


@pytest.mark.parametrize(
    ("nodes", "losses", "expected"),
    [
        (16, 2, 0.9333),
        (16, 3, 0.8),
        (16, 4, 0.6154),
        (100, 2, 0.98990),
        (16, 1, 1.0),
        (16, 16, 0.0),
    ],
)
def test_published_figures(nodes: int, losses: int, expected: float) -> None:
    survived, exact = place_copies(alone(nodes), 1).survival(losses)
    assert survived == pytest.approx(expected, abs=5e-5)
    assert exact


@pytest.mark.parametrize(
    "placed",
    [
        place_copies(alone(8), 1),
        place_copies(alone(9), 1),
        place_copies(alone(11), 3),
        place_copies(alone(9), 2),
        place_copies(["a", "a", "a", "b", "b", "c", "c"], 2),
        place_copies(["a"] * 5 + ["b"] * 5 + ["c"], 1),
    ],
)
def test_survival_is_what_counting_every_loss_gives_or_less(placed: CopyPlacement) -> None:
    nodes = len(placed.holders)
    for losses in range(nodes + 1):
        survived = sum(
            all(set(holders) - set(lost) for holders in placed.holders)
            for lost in combinations(range(nodes), losses)
        )
        probability, exact = placed.survival(losses)
        sets = {frozenset(holders) for holders in placed.holders}
        if exact:
            assert probability == pytest.approx(survived / comb(nodes, losses))
        else:
            assert sum(map(len, sets)) > nodes
            assert 0 <= probability <= survived / comb(nodes, losses)


def test_a_loss_that_is_possible_is_not_rounded_away() -> None:
    chances = place_copies(alone(10_000), 6).node_losses.whole
    assert [chance.probability == 1 for chance in chances] == [True] * 6 + [False] * 3


def test_a_large_ring_has_a_lower_bound() -> None:
    racks = ["a"] * 7 + ["b"] * 7 + ["c"] * 7 + ["d"] * 2
    placed = place_copies(racks, 2)
    bound, exact = placed.survival(4)
    survived = sum(
        all(set(holders) - set(lost) for holders in placed.holders)
        for lost in combinations(range(23), 4)
    )
    assert not exact
    assert not placed.crowded
    assert 0 < bound <= survived / comb(23, 4) < 1


def test_ten_thousand_nodes_take_less_than_a_second() -> None:
    racks = [f"rack{node // 16}" for node in range(10_001)]
    began = time.process_time()
    placed = place_copies(racks, 2)
    placed.survival(8)
    assert time.process_time() - began < 1.0
    assert not placed.crowded
    assert max(Counter(holder for _, *kept in placed.holders for holder in kept).values()) == 2
