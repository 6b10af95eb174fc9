"""Parity in other nodes' memory: every byte has its parity elsewhere, each node keeps its share, groups avoid failure
domains, and what the loss of nodes costs, counted one by one."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfall.policies.parity import ParityGeometry, place_parity


@st.composite
def geometries(draw: st.DrawFn) -> ParityGeometry:
    members = draw(st.integers(2, 9))
    losses = draw(st.integers(1, members - 1))
    return ParityGeometry(members, losses, draw(st.integers(1, 7)))


@given(geometries(), st.data())
def test_every_byte_has_its_parity_on_other_members(
    geometry: ParityGeometry, data: st.DataObject
) -> None:
    member = data.draw(st.integers(0, geometry.members - 1))
    start = data.draw(st.integers(0, 200))
    end = data.draw(st.integers(start, 300))
    at = start
    for piece in geometry.pieces(member, start, end):
        assert piece.start == at < piece.end
        at = piece.end
        assert piece.within + piece.end - piece.start <= geometry.block_bytes
        assert geometry.data_offset(member, piece.stripe) + piece.within == piece.start
        holders = geometry.holders(piece.stripe)
        assert len(set(holders) - {member}) == geometry.losses
        assert [geometry.row(piece.stripe, holder) for holder in holders] == [
            *range(geometry.losses)
        ]
    assert at == end


@given(geometries(), st.integers(1, 5))
def test_each_member_keeps_the_same_share(geometry: ParityGeometry, periods: int) -> None:
    """Blocks of parity do not overlap, leave no gaps, and are ``losses`` / (``members`` - ``losses``) of an image."""
    image = periods * geometry.data * geometry.block_bytes
    kept: dict[int, set[int]] = {holder: set() for holder in range(geometry.members)}
    for member in range(geometry.members):
        for piece in geometry.pieces(member, 0, image):
            for holder in geometry.holders(piece.stripe):
                kept[holder].add(geometry.parity_offset(holder, piece.stripe))
    blocks = periods * geometry.losses
    expected = {number * geometry.block_bytes for number in range(blocks)}
    assert all(offsets == expected for offsets in kept.values())


@given(geometries(), st.integers(0, 300))
def test_two_members_never_have_the_same_block_of_a_stripe(
    geometry: ParityGeometry, image: int
) -> None:
    for member in range(geometry.members):
        stripes = [piece.stripe for piece in geometry.pieces(member, 0, image)]
        assert len(set(stripes)) == len(stripes)
        assert all(geometry.row(stripe, member) is None for stripe in stripes)


@given(geometries(), st.data())
def test_the_share_of_an_image_in_a_holders_parity_is_what_its_pieces_sum_to(
    geometry: ParityGeometry, data: st.DataObject
) -> None:
    member, holder = (data.draw(st.integers(0, geometry.members - 1)) for _ in range(2))
    image = data.draw(st.integers(0, 300))
    sizes = [
        piece.end - piece.start
        for piece in geometry.pieces(member, 0, image)
        if holder in geometry.holders(piece.stripe)
    ]
    assert geometry.parity_share(member, holder, image) == sum(sizes)
    assert holder != member or not sizes


@pytest.mark.parametrize(
    ("members", "losses", "block_bytes", "error"),
    [
        (4, 0, 1, "0 losses in a group of 4; expected 1 to 3"),
        (4, 4, 1, "4 losses in a group of 4; expected 1 to 3"),
        (255, 2, 1, "expected a sum of 256 at most"),
        (4, 1, 0, "blocks of 0 bytes"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(
    members: int, losses: int, block_bytes: int, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        ParityGeometry(members, losses, block_bytes)


# Groups -----------------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[str], int, int]:
    domains = draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40))
    group = draw(st.integers(2, len(domains)))
    return domains, group, draw(st.integers(1, group - 1))


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


def test_ten_thousand_nodes_are_placed_within_a_second() -> None:
    domains = [f"rack{node // 32}" for node in range(10_000)]
    began = time.perf_counter()
    placed = place_parity(domains, 8, 1)
    chance, _ = placed.survival(10)
    assert time.perf_counter() - began < 1
    assert not placed.crowded
    assert 0.96 < chance < 0.98
