"""The stripes of parity: every byte has its parity on other members, and each member keeps the same share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.backends.parity.stripes import ParityGeometry

UNHURRIED = settings(deadline=None)


@st.composite
def geometries(draw: st.DrawFn) -> ParityGeometry:
    members = draw(st.integers(2, 9))
    losses = draw(st.integers(1, members - 1))
    return ParityGeometry(members, losses, draw(st.integers(1, 7)))


@UNHURRIED
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


@UNHURRIED
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


@UNHURRIED
@given(geometries(), st.integers(0, 300))
def test_two_members_never_have_the_same_block_of_a_stripe(
    geometry: ParityGeometry, image: int
) -> None:
    for member in range(geometry.members):
        stripes = [piece.stripe for piece in geometry.pieces(member, 0, image)]
        assert len(set(stripes)) == len(stripes)
        assert all(geometry.row(stripe, member) is None for stripe in stripes)


@UNHURRIED
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
