"""Where the bytes of an image go in host memory: straight into their targets, in pieces that a core's cache holds.

What comes out of the page cache is read to where it belongs and hashed there, while it is still in a cache: it crosses
memory once. Targets that overlap are not written so, since another thread may write there between reading and hashing.
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

# Source and target of one copy lie in a core's own cache together; longer copies took a fifth more time.
PIECE_BYTES = 512 << 10
# What is shorter goes by way of a scratch buffer, many at once.
STRAIGHT_BYTES = 64 << 10


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy bytes from address to address, on this thread alone: each reading thread starting torch's own threads would
    crowd the cores."""
    for done in range(0, count, PIECE_BYTES):
        ctypes.memmove(target + done, source + done, min(PIECE_BYTES, count - done))


class WrittenTargets:
    """What of its targets a restore has begun to write to, if only in part. Reading threads share it."""

    def __init__(self) -> None:
        self._ranges: list[tuple[TargetWriter, int, int]] = []

    def add(self, landing: TargetWriter, start: int, end: int) -> None:
        """Note the targets of ``start`` to ``end`` of an image's data; called before the first of these bytes goes to
        one."""
        self._ranges.append((landing, start, end))

    def targets(self) -> Iterator[torch.Tensor]:
        """The parts of flat targets that were noted."""
        for landing, start, end in self._ranges:
            for fill in landing.within(start, end):
                low, high = max(fill.start, start), min(fill.end, end)
                for target in fill.targets:
                    yield target[low - fill.start : high - fill.start]


class TargetWriter:
    """The targets of one restore. Reading threads share it."""

    def __init__(self, fills: Sequence[Fill], written: WrittenTargets) -> None:
        """``fills`` stand in image order. ``written`` is told what is written to."""
        self._fills = fills
        self.written = written
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

    def within(self, start: int, end: int) -> Iterator[Fill]:
        """The fills that have bytes from ``start`` to ``end`` of the data."""
        at = bisect_right(self._ends, start)
        while at < len(self._fills) and self._fills[at].start < end:
            yield self._fills[at]
            at += 1

    def is_in_host_memory(self, start: int, end: int) -> bool:
        """Say whether all targets of a range are, so that ``pieces`` can bring it there."""
        return all(t.is_cpu for fill in self.within(start, end) for t in fill.targets)

    def pieces(
        self, start: int, end: int, scratch: memoryview, digest: xxhash.xxh3_128
    ) -> Iterator[memoryview]:
        """Yield memory to be filled, one view after the other, with the bytes from ``start`` to ``end`` of the data.

        Once filled, each is hashed, and brought to its other targets. None is longer than ``scratch``.
        """
        self.written.add(self, start, end)
        at = start
        while at < end:
            number = bisect_right(self._ends, at)
            view, first = self._piece(number, at, end, scratch)
            yield view
            digest.update(view)
            if not first or len(self._fills[number].targets) > first:
                self._pass_on(view, at, at + len(view), first=first)
            at += len(view)

    def _piece(self, number: int, at: int, end: int, scratch: memoryview) -> tuple[memoryview, int]:
        """Choose the next piece, and how many targets of its fills have it once it is read."""
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

    def _pass_on(self, view: memoryview, start: int, end: int, *, first: int) -> None:
        """Copy bytes to the targets of their fills, without the ``first`` of each."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for fill in self.within(start, end):
            low, high = max(fill.start, start), min(fill.end, end)
            for target in fill.targets[first:]:
                copy_bytes(target.data_ptr() + low - fill.start, source + low - start, high - low)


def _memory(target: torch.Tensor) -> memoryview:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = target.numpy()
    return flat.data


def _overlapping(fills: Sequence[Fill]) -> set[int]:
    """Return the numbers of fills that share memory with another's targets."""
    ranges = sorted(
        (target.data_ptr(), target.data_ptr() + target.nbytes, number)
        for number, fill in enumerate(fills)
        for target in fill.targets
        if target.is_cpu
    )
    found: set[int] = set()
    furthest, owner = 0, -1
    for start, end, number in ranges:
        if start < furthest and number != owner:
            found |= {number, owner}
        if end > furthest:
            furthest, owner = end, number
    return found
