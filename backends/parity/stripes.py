"""Stripes: which member of a group keeps the parity of which bytes of the members' images. Pure.

A stripe has one block of each of its data members, and ``losses`` blocks of parity, on the other members. Which members
these are rotates from stripe to stripe, so that each keeps the same share (RAID 5 and 6, SCR's XOR sets). A member's
image fills its blocks in order, so that its length need not be known before. Images that are shorter count as followed
by zeros. Any ``losses`` members can be rebuilt from the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

SYMBOLS = 256
"""Values of a byte: members and rows of parity of a group together are at most as many."""


class ImagePiece(NamedTuple):
    """The bytes ``start`` to ``end`` of a member's image, which are ``within`` its block of ``stripe``, in bytes from
    the block's beginning."""

    start: int
    end: int
    stripe: int
    within: int


@dataclass(frozen=True)
class ParityGeometry:
    """The stripes of a group of ``members`` nodes that survives ``losses`` of them, in blocks of ``block_bytes``.

    Members and rows of parity have numbers from 0. Raises ValueError unless 1 <= ``losses`` < ``members``, members and
    losses together are at most SYMBOLS, and blocks have at least one byte.
    """

    members: int
    losses: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.losses < self.members:
            raise ValueError(
                f"parity for {self.losses} losses in a group of {self.members}; expected 1 to {self.members - 1} losses"
            )
        if self.members + self.losses > SYMBOLS:
            raise ValueError(
                f"a group of {self.members} with {self.losses} losses; expected a sum of {SYMBOLS} at most"
            )
        if self.block_bytes < 1:
            raise ValueError(f"blocks of {self.block_bytes} bytes; expected 1 or more")

    @property
    def data(self) -> int:
        """Blocks of data in a stripe."""
        return self.members - self.losses

    def row(self, stripe: int, member: int) -> int | None:
        """Return the row of parity that a member keeps of a stripe; None where it has a block of data there."""
        row = (member - stripe) % self.members
        return row if row < self.losses else None

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the members that keep a stripe's parity, by row."""
        return tuple((stripe + row) % self.members for row in range(self.losses))

    def pieces(self, member: int, start: int, end: int) -> Iterator[ImagePiece]:
        """Divide the bytes ``start`` to ``end`` of a member's image at the boundaries of blocks."""
        while start < end:
            block, within = divmod(start, self.block_bytes)
            stop = min(end, start - within + self.block_bytes)
            period, number = divmod(block, self.data)
            stripe = period * self.members + self._turns[member].data[number]
            yield ImagePiece(start, stop, stripe, within)
            start = stop

    def data_offset(self, member: int, stripe: int) -> int:
        """Return the offset in a member's image of its block of a stripe."""
        period, turn = divmod(stripe, self.members)
        return (period * self.data + self._turns[member].data.index(turn)) * self.block_bytes

    def parity_offset(self, member: int, stripe: int) -> int:
        """Return the offset of a stripe's block in the parity that a member keeps."""
        period, turn = divmod(stripe, self.members)
        return (period * self.losses + self._turns[member].parity.index(turn)) * self.block_bytes

    def parity_share(self, member: int, holder: int, image_bytes: int) -> int:
        """Return how many of the first ``image_bytes`` bytes of a member's image are coded in a holder's parity."""
        periods, rest = divmod(image_bytes, self.data * self.block_bytes)
        turns = self._turns[member].data
        whole = sum(self.row(turn, holder) is not None for turn in turns) * self.block_bytes
        last = sum(
            piece.end - piece.start
            for piece in self.pieces(member, 0, rest)
            if self.row(piece.stripe, holder) is not None
        )
        return periods * whole + last

    @cached_property
    def _turns(self) -> tuple[_Turns, ...]:
        """Of each member: the stripes of the first ``members`` in which it has data, and those of which it has parity.
        The others repeat these."""
        found = []
        for member in range(self.members):
            rows = [self.row(stripe, member) for stripe in range(self.members)]
            data = tuple(stripe for stripe, row in enumerate(rows) if row is None)
            parity = tuple(stripe for stripe, row in enumerate(rows) if row is not None)
            found.append(_Turns(data, parity))
        return tuple(found)


class _Turns(NamedTuple):
    data: tuple[int, ...]
    parity: tuple[int, ...]
