"""The code of parity: whatever members of a group are lost, the others have all that they had."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.backends.parity.coding import add_product, coefficient, rebuild_factors
from tierfall.backends.parity.stripes import ParityGeometry

UNHURRIED = settings(deadline=None)


def product(one: int, other: int) -> int:
    """Multiply in the field of 256 elements as in school: shift, add, reduce."""
    total = 0
    for bit in range(8):
        if other >> bit & 1:
            total ^= one << bit
    for bit in range(15, 7, -1):
        if total >> bit & 1:
            total ^= 0x11D << (bit - 8)
    return total


@UNHURRIED
@given(st.integers(0, 255), st.binary(max_size=9), st.randoms(use_true_random=False))
def test_a_product_is_added_to_each_byte(factor: int, block: bytes, random: Random) -> None:
    before = random.randbytes(len(block))
    total = bytearray(before)
    add_product(memoryview(total), memoryview(block), factor)
    assert total == bytes(
        old ^ product(factor, byte) for old, byte in zip(before, block, strict=True)
    )


def test_long_blocks_are_multiplied_to_their_end() -> None:
    block = Random(1).randbytes((1 << 18) + 3)
    total = bytearray(len(block))
    add_product(memoryview(total), memoryview(block), 29)
    table = bytes(product(29, byte) for byte in range(256))
    assert total == block.translate(table)


@pytest.mark.parametrize("losses", [1, 2, 5])
def test_the_first_row_is_plain_xor(losses: int) -> None:
    assert {coefficient(0, member, losses) for member in range(251)} == {1}


@pytest.mark.parametrize(
    ("members", "losses"),
    [(members, losses) for members in range(3, 9) for losses in range(1, min(4, members))],
)
def test_whatever_members_are_lost_their_images_are_rebuilt(members: int, losses: int) -> None:
    random = Random(members * 10 + losses)
    geometry = ParityGeometry(members, losses, 5)
    images = [random.randbytes(random.randrange(60)) for _ in range(members)]
    parity = coded(geometry, images)
    for lost in combinations(range(members), losses):
        for member in lost:
            assert rebuilt(geometry, images, parity, member, lost) == images[member]


def coded(geometry: ParityGeometry, images: list[bytes]) -> list[bytearray]:
    """Return the parity that each member keeps."""
    parity = [bytearray(400) for _ in images]
    for member, image in enumerate(images):
        for piece in geometry.pieces(member, 0, len(image)):
            block = memoryview(image)[piece.start : piece.end]
            for row, holder in enumerate(geometry.holders(piece.stripe)):
                at = geometry.parity_offset(holder, piece.stripe) + piece.within
                total = memoryview(parity[holder])[at : at + len(block)]
                add_product(total, block, coefficient(row, member, geometry.losses))
    return parity


def rebuilt(
    geometry: ParityGeometry,
    images: list[bytes],
    parity: list[bytearray],
    member: int,
    lost: tuple[int, ...],
) -> bytes:
    """Rebuild a member's image from what the members have that are not lost."""
    image = b""
    for piece in geometry.pieces(member, 0, len(images[member])):
        length = piece.end - piece.start
        holders = geometry.holders(piece.stripe)
        data = [each for each in range(geometry.members) if each not in holders]
        missing = [each for each in data if each in lost]
        rows = [row for row, holder in enumerate(holders) if holder not in lost][: len(missing)]
        kept = [each for each in data if each not in lost]
        of_rows, of_members = rebuild_factors(member, missing, rows, kept, geometry.losses)
        total = bytearray(length)
        for row, factor in of_rows.items():
            holder = holders[row]
            at = geometry.parity_offset(holder, piece.stripe) + piece.within
            add_product(memoryview(total), memoryview(parity[holder])[at : at + length], factor)
        for each, factor in of_members.items():
            at = geometry.data_offset(each, piece.stripe) + piece.within
            block = images[each][at : at + length].ljust(length, b"\0")
            add_product(memoryview(total), memoryview(block), factor)
        image += total
    return image
