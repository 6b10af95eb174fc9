"""Sampled cache lines of tensors in host memory: which lines, reading them, and comparing them with an image.

A short range is read whole: its lines, and the bytes beside them. Of each other range, about a hundred lines of its
tensor are read: the first and the last line of each range, and others between. Each distance is at most 1 % of the
tensor, so that a write to a contiguous percent hits a line. The distances increase slowly, so that no row length
repeats them and the lines do not fall into one column. A write to a random percent of the elements is missed with a
probability of 1e-7.

All lines are read through one array over the memory from the first tensor to the last, by one call: a call per tensor
would take longer than the reads.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from tierfall.core.sampling.ranges import (
    LINE_BYTES,
    WHOLE_BYTES,
    WHOLE_LINES,
    Integers,
    ProcessMemory,
    SampledRange,
    addresses_of,
    logical_offsets,
    memory_offsets,
)

LINES_MAX = 113
"""Lines of a tensor that is one range: the first, the last, and others at distances of at most 1 % of it."""
GROWTH = 0.08
"""The first distance is shorter than the mean by this fraction, the last is longer by it."""
LINES_MIN = 11
"""Minimum of lines per range of a tensor with many ranges."""
LINES_ALL = 1 << 21
"""Maximum of lines in total: 128 MiB of samples."""
NOW_LINES = 2
"""Lines per range that are read again at the barrier."""
DRAW_SERVES = 8
"""Images that are compared at the same places, until others are drawn."""


class _AlignedLines(NamedTuple):
    """Lines ``first`` to ``last``, whose offsets in the image's data all are ``remainder`` modulo LINE_BYTES: ``rows``
    of the data from that offset on."""

    first: int
    last: int
    remainder: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Draw:
    """The lines of one random draw, for ranges at these ``addresses``: the range of each line (``lines_of``), its byte
    offset there (``lines_at``), the groups of lines by alignment in the image's data, and the lines that the barrier
    reads (``now``). Of the ranges all of whose lines are read, ``bytes_of`` and ``bytes_at`` are the bytes that are in
    no line. ``lines`` and ``bytes`` are the places of both in ``memory``, ``lines_now`` those of ``now``."""

    addresses: Integers
    memory: ProcessMemory
    lines_of: Integers
    lines_at: Integers
    groups: tuple[_AlignedLines, ...]
    in_order: int
    """The number of leading lines that are contiguous in the image too: those of ``groups``."""
    now: torch.Tensor
    lines_now: torch.Tensor
    bytes_of: Integers
    bytes_at: Integers
    lines: torch.Tensor
    bytes: torch.Tensor


class SamplePlan:
    """The sampled lines of one layout's ranges. ``count_use`` may be called by any thread."""

    def __init__(
        self, ranges: Sequence[SampledRange], lines: Integers, *, anew: bool = True
    ) -> None:
        """``lines``: the maximum number of lines by range; ``anew``: each draw is at other places."""
        # Contiguous ranges first, grouped by alignment in the image: one call compares a group.
        order = sorted(range(len(ranges)), key=lambda n: _alignment(ranges[n]))
        self._ranges = [ranges[n] for n in order]
        self._lines = lines[order]
        self._anew = anew
        self.numbers = np.array([p.index for p in self._ranges], dtype=np.int64)
        self._offsets = np.array([p.offset for p in self._ranges], dtype=np.int64)
        self._starts = np.array([p.start for p in self._ranges], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in self._ranges], dtype=np.int64)
        self._ordered = sum(p.order is None for p in self._ranges)
        self._uses = 0
        self._drawn: _Draw | None = None
        """The draw of the last read: usually that of the next one."""

    def read(self, pointers: array[int]) -> Samples | None:
        """Read the samples; ``pointers`` are addresses by tensor number. None if there are no ranges."""
        if not self._ranges:
            return None
        draw = self._drawn
        addresses = addresses_of(pointers, self.numbers) + self._offsets
        if draw is None or not np.array_equal(draw.addresses, addresses):
            draw = self._drawn = self._draw(addresses)
        lines = draw.memory.lines.index_select(0, draw.lines)
        beside = draw.memory.bytes.index_select(0, draw.bytes)
        return Samples(self, draw, lines, beside)

    def count_use(self) -> None:
        """Count a compared image. After DRAW_SERVES of them other lines are drawn, so that a change with a regular
        pattern is not missed every time."""
        self._uses += 1
        if (draw := self._drawn) is not None and self._uses % DRAW_SERVES == 1:
            self._drawn = self._draw(draw.addresses)

    def _draw(self, addresses: Integers) -> _Draw:
        head = np.minimum(-addresses % LINE_BYTES, self._sizes)
        whole = (self._sizes - head) // LINE_BYTES
        counts = np.minimum(whole, self._lines)
        lines_of, nth = enumerate_groups(counts)
        phase = int.from_bytes(os.urandom(4), "little") / 2**32 if self._anew else 0.5
        lines_at = _spread_lines(nth, counts[lines_of], whole[lines_of], phase)
        self._move_to_element_order(lines_of, lines_at, head)
        lines_at += head[lines_of]
        beside = np.where(counts == whole, self._sizes - whole * LINE_BYTES, 0)
        bytes_of, at = enumerate_groups(beside)
        bytes_at = np.where(at < head[bytes_of], at, at + whole[bytes_of] * LINE_BYTES)
        in_order = int(counts[: self._ordered].sum())
        memory = ProcessMemory(int(addresses.min()), int((addresses + self._sizes).max()))
        offsets = addresses - memory.low
        now = np.flatnonzero(nth % np.maximum(1, counts[lines_of] // NOW_LINES) == 0)
        lines = (offsets[lines_of] + lines_at) // LINE_BYTES
        return _Draw(
            addresses=addresses,
            memory=memory,
            lines_of=lines_of,
            lines_at=lines_at,
            groups=_grouped((self._starts[lines_of] + lines_at)[:in_order]),
            in_order=in_order,
            now=torch.from_numpy(now),
            lines_now=torch.from_numpy(lines[now]),
            bytes_of=bytes_of,
            bytes_at=bytes_at,
            lines=torch.from_numpy(lines),
            bytes=torch.from_numpy(offsets[bytes_of] + bytes_at),
        )

    def _move_to_element_order(
        self, lines_of: Integers, lines_at: Integers, head: Integers
    ) -> None:
        """In non-contiguous tensors, move every second line to evenly spread elements in the order of elements:
        a row of the tensor may be a column in memory."""
        for number in range(self._ordered, len(self._ranges)):
            order = self._ranges[number].order
            assert order is not None
            size = int(self._sizes[number])
            second = np.flatnonzero(lines_of == number)[1:-1:2]
            if size > WHOLE_BYTES:
                at = memory_offsets(np.linspace(0, size - 1, len(second), dtype=np.int64), *order)
                lines_at[second] = (
                    np.clip(
                        (at - head[number]) // LINE_BYTES,
                        0,
                        (size - head[number]) // LINE_BYTES - 1,
                    )
                    * LINE_BYTES
                )

    def in_image(self, ranges: Integers, offsets: Integers) -> Integers:
        """Offsets in the image's data of bytes that are given by range and offset in memory."""
        found = self._starts[ranges] + offsets
        for number in np.unique(ranges[ranges >= self._ordered]):
            order = self._ranges[number].order
            assert order is not None
            rows = ranges == number
            found[rows] = self._starts[number] + logical_offsets(offsets[rows], *order)
        return found


@dataclass(frozen=True, slots=True)
class Samples:
    """The lines, and the bytes beside them, that were read of one state."""

    _plan: SamplePlan
    _draw: _Draw
    _lines: torch.Tensor
    _bytes: torch.Tensor

    def changed_in(self, data: torch.Tensor) -> list[int]:
        """The numbers of the tensors that differ from an image's ``data``, flat uint8."""
        draw = self._draw
        found: set[int] = set()
        lines = self._lines.view(torch.uint8)
        for first, last, remainder, rows in draw.groups:
            end = remainder + (len(data) - remainder) // LINE_BYTES * LINE_BYTES
            stored = data[remainder:end].view(-1, LINE_BYTES).index_select(0, rows)
            if not torch.equal(stored, lines[first:last]):
                found |= _numbers_where(
                    draw.lines_of[first:last], (stored != lines[first:last]).any(1)
                )
        if draw.in_order < len(lines):
            ranges = np.repeat(draw.lines_of[draw.in_order :], LINE_BYTES)
            offsets = draw.lines_at[draw.in_order :, None] + np.arange(LINE_BYTES)
            at = torch.from_numpy(self._plan.in_image(ranges, offsets.ravel()))
            found |= _numbers_where(ranges, data[at] != lines[draw.in_order :].flatten())
        at = torch.from_numpy(self._plan.in_image(draw.bytes_of, draw.bytes_at))
        found |= _numbers_where(draw.bytes_of, data[at] != self._bytes)
        return self._numbers(found)

    def changed_now(self) -> list[int]:
        """The numbers of the tensors whose live memory, which must still be mapped, differs in a few lines of each."""
        draw = self._draw
        lines = draw.memory.lines.index_select(0, draw.lines_now)
        at_save = self._lines.index_select(0, draw.now)
        if torch.equal(lines, at_save):
            return []
        ranges = draw.lines_of[draw.now.numpy()]
        return self._numbers(_numbers_where(ranges, (lines != at_save).any(1)))

    def differ_from(self, others: Samples) -> list[int]:
        """The numbers of the tensors that differ from samples of the same draw, read at another time."""
        draw = self._draw
        assert draw is others._draw, "samples of different draws cannot be compared"
        found = _numbers_where(draw.lines_of, (self._lines != others._lines).any(1))
        return self._numbers(found | _numbers_where(draw.bytes_of, self._bytes != others._bytes))

    def not_finite(self, dtype: torch.dtype) -> list[int]:
        """The numbers of the tensors, all of this floating ``dtype``, with NaN or an infinity."""
        draw = self._draw
        lines, beside = (each.view(dtype).isfinite() for each in (self._lines, self._bytes))
        found = _numbers_where(draw.lines_of, ~lines.all(1))
        return self._numbers(found | _numbers_where(draw.bytes_of[:: dtype.itemsize], ~beside))

    def _numbers(self, found: set[int]) -> list[int]:
        return sorted({int(self._plan.numbers[item]) for item in found})


def _alignment(item: SampledRange) -> tuple[bool, int]:
    return item.order is not None, item.start % LINE_BYTES


def lines_max(ranges: Sequence[SampledRange]) -> Integers:
    """The maximum number of lines of each range: WHOLE_LINES of a short one, NOW_LINES of one that is digested whole;
    otherwise a share of the LINES_MAX of its tensor, reduced if the total would exceed LINES_ALL."""
    sizes = np.array([p.bytes for p in ranges], dtype=np.int64)
    _, of = np.unique(np.array([p.index for p in ranges]), return_inverse=True)
    shares = sizes / np.bincount(of, weights=sizes)[of]
    counts = np.maximum(LINES_MIN, np.ceil((LINES_MAX - 2) * shares).astype(np.int64) + 2)
    counts[[p.order is not None for p in ranges]] *= (
        2  # in the order of memory, and in that of elements
    )
    counts[sizes <= WHOLE_BYTES] = NOW_LINES
    total = int(np.minimum(sizes // LINE_BYTES, counts).sum())
    counts = np.maximum(NOW_LINES, counts * min(LINES_ALL, total) // max(1, total))
    return np.where(sizes <= WHOLE_LINES * LINE_BYTES, WHOLE_LINES, counts)


def _spread_lines(nth: Integers, counts: Integers, whole: Integers, phase: float) -> Integers:
    """The byte offset of the ``nth`` of ``counts`` lines of a range that has ``whole`` lines: the first, the last, and
    others between at increasing distances."""
    share = (nth - 1 + phase) / np.maximum(1, counts - 2)
    lines = ((share + GROWTH * (share * share - share)) * whole).astype(np.int64)
    lines = np.where(nth == 0, 0, np.where(nth == counts - 1, whole - 1, lines))
    return np.where(counts == whole, nth, lines) * LINE_BYTES


def enumerate_groups(counts: Integers) -> tuple[Integers, Integers]:
    """For groups of ``counts`` items: the group number of each item, and its index in the group."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - (np.cumsum(counts) - counts)[of]


def _grouped(places: Integers) -> tuple[_AlignedLines, ...]:
    """Group consecutive lines whose offsets in the image's data have the same remainder modulo LINE_BYTES."""
    if not len(places):
        return ()
    remainders = places % LINE_BYTES
    edges = [0, *map(int, np.flatnonzero(np.diff(remainders)) + 1), len(places)]
    groups = []
    for first, last in pairwise(edges):
        remainder = int(remainders[first])
        rows = torch.from_numpy((places[first:last] - remainder) // LINE_BYTES)
        groups.append(_AlignedLines(first, last, remainder, rows))
    return tuple(groups)


def _numbers_where(tensors: Integers, differs: torch.Tensor) -> set[int]:
    return {*map(int, np.unique(tensors[differs.numpy()]))}
