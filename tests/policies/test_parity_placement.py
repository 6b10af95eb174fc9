"""Groups of nodes that keep each other's parity: they avoid failure domains, and what the loss of nodes costs, counted
one by one."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.policies.placement import place_parity

UNHURRIED = settings(deadline=None)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[str], int, int]:
    domains = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40))
    group = draw(st.integers(2, len(domains)))
    return domains, group, draw(st.integers(1, group - 1))


@UNHURRIED
@given(placements())
def test_every_node_is_in_one_group_that_is_large_enough(
    drawn: tuple[list[str], int, int],
) -> None:
    domains, group, losses = drawn
    placed = place_parity(domains, group, losses)
    assert sorted(node for nodes in placed.groups for node in nodes) == [*range(len(domains))]
    sizes = [len(nodes) for nodes in placed.groups]
    assert min(sizes) >= group
    assert max(sizes) - min(sizes) <= 1


@UNHURRIED
@given(placements())
def test_a_group_has_as_few_nodes_of_a_domain_as_can_be(drawn: tuple[list[str], int, int]) -> None:
    domains, group, losses = drawn
    placed = place_parity(domains, group, losses)
    most = [
        max(Counter(domains[node] for node in nodes).values(), default=0) for nodes in placed.groups
    ]
    largest = max(Counter(domains).values())
    assert max(most) == -(-largest // len(placed.groups))
    assert list(placed.crowded) == [at for at, count in enumerate(most) if count > losses]


@pytest.mark.parametrize(
    ("nodes", "group", "losses", "error"),
    [
        (4, 5, 1, "groups of 5, and 4 nodes"),
        (4, 4, 4, "expected 1 to 3 losses"),
        (4, 1, 1, "expected 1 to 0 losses"),
    ],
)
def test_groups_that_cannot_be_are_refused(nodes: int, group: int, losses: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        place_parity([f"n{node}" for node in range(nodes)], group, losses)


@pytest.mark.parametrize(
    ("nodes", "group", "losses"), [(4, 4, 1), (9, 4, 2), (12, 3, 1), (7, 4, 3)]
)
def test_the_survival_is_what_all_losses_counted_one_by_one_give(
    nodes: int, group: int, losses: int
) -> None:
    placed = place_parity([f"n{node}" for node in range(nodes)], group, losses)
    for lost in range(nodes + 1):
        sets = list(combinations(range(nodes), lost))
        survived = sum(
            all(len(set(gone) & set(members)) <= losses for members in placed.groups)
            for gone in sets
        )
        assert placed.survival(lost) == (pytest.approx(survived / len(sets)), True)


def test_the_chances_are_those_of_losses_beyond_what_is_certain() -> None:
    found = place_parity([f"n{node}" for node in range(8)], 4, 1).node_losses
    assert [chance.losses for chance in found.whole] == [1, 2, 3, 4]
    assert [chance.probability == 1 for chance in found.whole] == [True, False, False, False]
    assert found.whole[1].probability == pytest.approx(16 / 28)
    assert all(chance.exact for chance in found.whole)
    assert {chance.probability for chance in found.copies} == {0.0}


def test_ten_thousand_nodes_are_placed_within_a_second() -> None:
    domains = [f"rack{node // 32}" for node in range(10_000)]
    began = time.perf_counter()
    placed = place_parity(domains, 8, 1)
    chance, _ = placed.survival(10)
    assert time.perf_counter() - began < 1
    assert not placed.crowded
    assert 0.96 < chance < 0.98
