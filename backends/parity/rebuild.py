"""Reading the images of a parity set, also of members that are lost: from the others' images and the parity.

An image is read from its member. Where that does not have it, each block is the sum of the other blocks of its stripe,
each multiplied with a factor. Blocks are read one after the other into one buffer, and added to the result, so that
memory does not grow with the group. Nothing is verified here: who reads compares each chunk with the manifest's digest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from tierfall.backends.parity.coding import add_product, rebuild_factors
from tierfall.backends.parity.sets import ParitySet, parity_key
from tierfall.backends.parity.stripes import ImagePiece
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    BackendError,
    KeyNotFoundError,
    TruncatedError,
    UnreachableError,
)

LOST_FOR_S = 30.0
"""A node that does not answer is asked again after so many seconds."""


class NodeMemory(NamedTuple):
    """What a node has: the ``parity`` that it keeps, and the images of its own ranks, the ``originals``."""

    parity: Backend
    originals: Backend


class _Source(NamedTuple):
    """A block that is to be read: from ``backend``, where ``member`` has it; ``is_parity``: it is no part of an image.
    ``end``: what follows in its object are zeros."""

    member: int
    is_parity: bool
    backend: Backend
    key: str
    offset: int
    end: int | None
    factor: int


class _SourceLostError(Exception):
    """A member does not have what it should have, or does not answer."""


class SetReader:
    """Reads images of one set. ``nodes`` are those of this start, by id. ``lost`` are members whose images are not read
    from themselves. May be used by several threads."""

    def __init__(
        self, found: ParitySet, nodes: Mapping[str, NodeMemory], *, lost: Collection[int] = ()
    ) -> None:
        self._set = found
        self._nodes = nodes
        self._losses: dict[tuple[int, bool], tuple[float, BackendError]] = {}
        """Of members whose image or parity (True) is not read: until when, on the monotonic clock, and why."""
        for member in lost:
            reason = KeyNotFoundError("it is not read from its own node")
            self._losses[member, False] = float("inf"), reason
        for member, image in enumerate(found.images):
            if image.node not in nodes:
                gone = KeyNotFoundError("its node is not in this start")
                self._losses[member, False] = self._losses[member, True] = float("inf"), gone

    def read_into(self, member: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` of a member's image. Raises UnreachableError where nodes that would be needed
        do not answer, and another BackendError where too many do not have their part."""
        if not self._is_lost(member, is_parity=False):
            image = self._set.image_key(member)
            try:
                self._originals(member).read_into(image, offset, view)
                return
            except BackendError as error:
                self._note_loss(member, error, is_parity=False)
        buffer = memoryview(bytearray(min(self._set.geometry.block_bytes, view.nbytes)))
        for piece in self._set.geometry.pieces(member, offset, offset + view.nbytes):
            self._rebuild(member, piece, view[piece.start - offset : piece.end - offset], buffer)

    def _rebuild(
        self, member: int, piece: ImagePiece, view: memoryview, buffer: memoryview
    ) -> None:
        """Rebuild a piece of a member's image. What turns out to be lost is left out from then on."""
        while True:
            view[:] = bytes(view.nbytes)
            try:
                for source in self._sources(member, piece):
                    self._add(source, view, buffer)
                return
            except _SourceLostError:
                continue

    def _sources(self, member: int, piece: ImagePiece) -> Iterator[_Source]:
        """Yield the blocks whose sum is the piece. Raises BackendError where too many are lost."""
        geometry, stripe = self._set.geometry, piece.stripe
        holders = geometry.holders(stripe)
        data = [each for each in range(geometry.members) if each not in holders]
        missing = [each for each in data if each == member or self._is_lost(each, is_parity=False)]
        rows = [row for row, h in enumerate(holders) if not self._is_lost(h, is_parity=True)]
        if len(rows) < len(missing):
            raise self._too_many_lost(member)
        kept = [each for each in data if each not in missing]
        of_rows, of_members = rebuild_factors(
            member, missing, rows[: len(missing)], kept, geometry.losses
        )
        for row, factor in of_rows.items():
            holder = holders[row]
            at = geometry.parity_offset(holder, stripe) + piece.within
            memory = self._nodes[self._set.images[holder].node].parity
            yield _Source(holder, True, memory, parity_key(self._set.key), at, None, factor)
        for each, factor in of_members.items():
            at = geometry.data_offset(each, stripe) + piece.within
            end, key = self._set.images[each].bytes, self._set.image_key(each)
            yield _Source(each, False, self._originals(each), key, at, end, factor)

    def _add(self, source: _Source, view: memoryview, buffer: memoryview) -> None:
        length = view.nbytes
        if source.end is not None:
            length = max(0, min(length, source.end - source.offset))
        if not length:
            return
        block = buffer[:length]
        try:
            source.backend.read_into(source.key, source.offset, block)
        except BackendError as error:
            self._note_loss(source.member, error, is_parity=source.is_parity)
            raise _SourceLostError from error
        add_product(view[:length], block, source.factor)

    def _originals(self, member: int) -> Backend:
        return self._nodes[self._set.images[member].node].originals

    def _is_lost(self, member: int, *, is_parity: bool) -> bool:
        until, _ = self._losses.get((member, is_parity), (0.0, None))
        return time.monotonic() < until

    def _note_loss(self, member: int, error: BackendError, *, is_parity: bool) -> None:
        until = time.monotonic() + LOST_FOR_S if error.retryable else float("inf")
        self._losses[member, is_parity] = until, error

    def _too_many_lost(self, member: int) -> BackendError:
        """Make the error of an image that cannot be rebuilt now."""
        lost = [key for key in sorted(self._losses) if self._is_lost(key[0], is_parity=key[1])]
        reasons = {key: self._losses[key][1] for key in lost}
        text = "; ".join(
            f"{'parity' if is_parity else 'image'} of {self._set.images[each].node}: {reason}"
            for (each, is_parity), reason in reasons.items()
        )
        unread = [error for error in reasons.values() if not error.is_damage]
        silent = any(error.retryable for error in unread)
        make = UnreachableError if silent else BackendError if unread else TruncatedError
        return make(
            f"{self._set.image_key(member)} cannot be rebuilt: its parity survives the loss of "
            f"{self._set.geometry.losses} of {self._set.geometry.members} nodes, but these are lost: {text}"
        )
