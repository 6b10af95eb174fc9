"""The targets of an image's bytes in host memory: reading directly into them, in blocks that fit a core's cache.

Bytes in the page cache are read into their target and hashed there, while they are in the CPU cache: they cross the
memory bus once. Targets that overlap are not written this way, since another thread may write to them between read and
hash.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from tierfall.core.load.build import Fill

# Source and target of one copy fit a core's own cache together; longer copies took a fifth more time.
PIECE_BYTES = 512 << 10
# Shorter fills are read through a scratch buffer, many at once.
STRAIGHT_BYTES = 64 << 10


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy bytes from address to address on this thread only: torch's copy would start threads of its own for each
    reading thread."""
    for done in range(0, count, PIECE_BYTES):
        ctypes.memmove(target + done, source + done, min(PIECE_BYTES, count - done))


class TargetWriter:
    """The targets of one restore. Shared by the reading threads."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        """``fills`` are in image order."""
        self._fills = fills
        self._ends = [fill.end for fill in fills]
        overlapping = _overlapping(fills)
        self._straight = [
            _memory(fill.targets[0])
            if fill.end - fill.start >= STRAIGHT_BYTES
            and fill.targets[0].is_cpu
            and number not in overlapping
            else None
            for number, fill in enumerate(fills)
        ]

    def within(self, start: int, end: int) -> Iterator[tuple[Fill, int, int]]:
        """Yield the fills that overlap bytes ``start`` to ``end`` of the data, each with the range of these in it."""
        at = bisect_right(self._ends, start)
        while at < len(self._fills) and (fill := self._fills[at]).start < end:
            yield fill, max(fill.start, start), min(fill.end, end)
            at += 1

    def is_in_host_memory(self, start: int, end: int) -> bool:
        """Return whether all targets of a range are in host memory, so that ``pieces`` can fill them."""
        return all(t.is_cpu for fill, _, _ in self.within(start, end) for t in fill.targets)

    def pieces(
        self, start: int, end: int, scratch: memoryview, digest: xxhash.xxh3_128
    ) -> Iterator[memoryview]:
        """Yield views to fill with bytes ``start`` to ``end`` of the data, one after the other. None is longer than
        ``scratch``.

        Each filled view is added to ``digest``, and copied to the further targets of its bytes.
        """
        at = start
        while at < end:
            number = bisect_right(self._ends, at)
            view, first = self._piece(number, at, end, scratch)
            yield view
            digest.update(view)
            if not first or len(self._fills[number].targets) > first:
                self._copy_to_targets(view, at, at + len(view), first=first)
            at += len(view)

    def _piece(self, number: int, at: int, end: int, scratch: memoryview) -> tuple[memoryview, int]:
        """Return the next view, and how many targets of its fill contain its bytes once it is filled."""
        end = min(end, at + min(PIECE_BYTES, len(scratch)))
        if number < len(self._fills):
            straight, fill = self._straight[number], self._fills[number]
            if straight is not None and fill.start <= at:
                return straight[at - fill.start : min(end, fill.end) - fill.start], 1
        while number < len(self._fills) and self._fills[number].start < end:
            if self._straight[number] is not None and self._fills[number].start > at:
                end = self._fills[number].start
                break
            number += 1
        return scratch[: end - at], 0

    def _copy_to_targets(self, view: memoryview, start: int, end: int, *, first: int) -> None:
        """Copy bytes to the targets of their fills, except for the ``first`` ones of each."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for fill, low, high in self.within(start, end):
            for target in fill.targets[first:]:
                copy_bytes(target.data_ptr() + low - fill.start, source + low - start, high - low)


def digest_pieces(view: memoryview, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
    """Yield a view piece by piece, and add each to ``digest`` once it is filled."""
    for at in range(0, len(view), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        yield piece
        digest.update(piece)


def _memory(target: torch.Tensor) -> memoryview:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = target.numpy()
    return flat.data


def _overlapping(fills: Sequence[Fill]) -> set[int]:
    """Return the numbers of fills whose targets share memory with those of another fill."""
    ranges = sorted(
        (target.data_ptr(), target.data_ptr() + target.nbytes, number)
        for number, fill in enumerate(fills)
        for target in fill.targets
        if target.is_cpu
    )
    found: set[int] = set()
    last_end, owner = 0, -1
    for start, end, number in ranges:
        if start < last_end and number != owner:
            found |= {number, owner}
        if end > last_end:
            last_end, owner = end, number
    return found
