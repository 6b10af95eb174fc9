"""Samples: bytes of a state as they are at save, which the image must hold too.

A lazy capture copies the state while the training goes on. Whether the image holds the state as it was at save, only
bytes read at save can tell: a write that came before the copy is in the image and in the live tensor alike. save()
reads, in host memory, of each piece that is copied in one go:

* a digest of all of it, where it is short;
* else about a hundred cache lines of its tensor: the first and the last line of each piece, and others between. Each
  distance is at most a percent of the tensor, so that a write to one contiguous percent meets a line. The distances
  grow slowly, so that no length of a row repeats them and the lines do not fall into one column. A write to a percent
  of the elements at random is missed with a probability of 1e-7;
* digests of whole ranges, in rotation, as many as the time allowed for that takes.

On a device it enqueues a sum over each tensor. The capture thread compares all of it with the image before that is
sealed. A piece that is copied while all of it is written to holds some of the write at its beginning, or at its end,
however little that is. Lines are read through one array over the range of memory from the first tensor to the last, so
that one call reads all: a call for each tensor would take longer than the reads.
"""

from __future__ import annotations

import logging
import math
import os
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierfall.core.image.segments import HOST, Segmentation
from tierfall.core.image.sources import TensorSources
from tierfall.core.runtime.process_memory import LINE_BYTES, ProcessMemory
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import INTEGERS, as_bytes, as_integers

logger = logging.getLogger("tierfall")
Integers = NDArray[np.int64]
Order = tuple[tuple[int, ...], tuple[int, ...], int]

LINES_MAX = 113
"""Lines of a tensor that is one piece: the first, the last, and others whose distances are a percent of it at most."""
GROWTH = 0.08
"""The first of these distances is so much shorter than their mean, the last so much longer."""
LINES_MIN = 11
"""Lines of a piece, where a tensor is cut into many."""
LINES_ALL = 1 << 21
"""Lines of all pieces: 128 MiB of samples."""
WHOLE_BYTES = 32 << 10
"""A piece of no more is digested whole: that takes less time than to read its lines."""
NOW_LINES = 2
"""So many lines of a piece are read again at the barrier."""
DRAW_SERVES = 8
"""So many images are compared in the same places."""
RANGE_BYTES = 1 << 20
"""A digest is of so many bytes at most."""


@dataclass(frozen=True, slots=True)
class SampledRange:
    """A piece of a tensor in host memory as it is sampled: the tensor's number in the state, where the piece begins in
    the tensor and in the image (in the data), its length in bytes, and, of a tensor whose elements do not lie in order,
    which is one piece, shape, strides and item size."""

    index: int
    offset: int
    start: int
    bytes: int
    order: Order | None


class _AlignedLines(NamedTuple):
    """Lines ``first`` to ``last``, whose places in the image's data have one remainder by the length of a line, and
    are the rows ``rows`` from there on."""

    first: int
    last: int
    remainder: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Draw:
    """The places of one draw: for each line its piece and its offset there, in bytes; where those of pieces in order
    lie in the image's data; and which lines are read at the barrier. It holds for pieces whose addresses have these
    ``remainders`` by the length of a line."""

    remainders: Integers
    lines_of: Integers
    lines_at: Integers
    groups: tuple[_AlignedLines, ...]
    in_order: int
    """The first lines, so many, lie in the image as they lie in memory: those of the groups."""
    now: Integers


@dataclass(frozen=True, slots=True)
class _PlacedDraw:
    """A draw for pieces at certain ``addresses``: the numbers of the lines in ``memory``."""

    addresses: Integers
    memory: ProcessMemory
    draw: _Draw
    lines: torch.Tensor
    now: torch.Tensor


class SamplePlan:
    """Where the tensors of one layout are sampled, piece by piece. ``used`` may be called by any thread."""

    def __init__(self, pieces: Sequence[SampledRange], lines: Integers) -> None:
        """``lines`` says of each piece how many lines are read, at most."""
        # Those in order first, those of one alignment in the image together: each group is compared by one call.
        order = sorted(range(len(pieces)), key=lambda n: _alignment(pieces[n]))
        self._pieces = [pieces[n] for n in order]
        self._lines = lines[order]
        self.numbers = np.array([p.index for p in self._pieces], dtype=np.int64)
        self._offsets = np.array([p.offset for p in self._pieces], dtype=np.int64)
        self._starts = np.array([p.start for p in self._pieces], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in self._pieces], dtype=np.int64)
        self._ordered = sum(p.order is None for p in self._pieces)
        self._uses = 0
        self._placed: _PlacedDraw | None = None

    def take(self, pointers: array[int]) -> Samples | None:
        """Read the samples of tensors at these addresses, given by their numbers; None where there are none."""
        if not self._pieces:
            return None
        placed = self._placed
        addresses = _addresses(pointers, self.numbers) + self._offsets
        if placed is None or not np.array_equal(placed.addresses, addresses):
            placed = self._placed = self._place(addresses, None if placed is None else placed.draw)
        with torch.inference_mode(False), torch.no_grad():
            lines = placed.memory.lines.index_select(0, placed.lines)
        return Samples(self, placed, lines)

    def used(self) -> None:
        """An image was compared. From time to time other places are chosen, so that what changes in a pattern is not
        missed each time."""
        placed = self._placed
        self._uses += 1
        if placed is None or self._uses % DRAW_SERVES != 1:
            return
        self._placed = self._place(placed.addresses, None)

    def _place(self, addresses: Integers, draw: _Draw | None) -> _PlacedDraw:
        remainders = addresses % LINE_BYTES
        if draw is None or not np.array_equal(draw.remainders, remainders):
            draw = self._draw(remainders)
        memory = ProcessMemory(int(addresses.min()), int((addresses + self._sizes).max()))
        offsets = addresses - memory.low
        lines = (offsets[draw.lines_of] + draw.lines_at) // LINE_BYTES
        return _PlacedDraw(
            addresses=addresses,
            memory=memory,
            draw=draw,
            lines=torch.from_numpy(lines),
            now=torch.from_numpy(lines[draw.now]),
        )

    def _draw(self, remainders: Integers) -> _Draw:
        head = np.minimum(-remainders % LINE_BYTES, self._sizes)
        whole = (self._sizes - head) // LINE_BYTES
        counts = np.minimum(whole, self._lines)
        lines_of, nth = spread(counts)
        phase = int.from_bytes(os.urandom(4), "little") / 2**32
        lines_at = _spread_lines(nth, counts[lines_of], whole[lines_of], phase)
        self._spread_as_read(lines_of, lines_at, head)
        lines_at += head[lines_of]
        in_order = int(counts[: self._ordered].sum())
        return _Draw(
            remainders=remainders,
            lines_of=lines_of,
            lines_at=lines_at,
            groups=_grouped((self._starts[lines_of] + lines_at)[:in_order]),
            in_order=in_order,
            now=np.flatnonzero(nth % np.maximum(1, counts[lines_of] // NOW_LINES) == 0),
        )

    def _spread_as_read(self, lines_of: Integers, lines_at: Integers, head: Integers) -> None:
        """Put each second line of a piece whose elements do not lie in order at evenly spread elements, as they read:
        what is a row there is a column in memory."""
        for number in range(self._ordered, len(self._pieces)):
            order = self._pieces[number].order
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

    def in_image(self, pieces: Integers, offsets: Integers) -> Integers:
        """Say where in the image's data bytes of pieces lie, given by their offsets in memory."""
        found = self._starts[pieces] + offsets
        for number in np.unique(pieces[pieces >= self._ordered]):
            order = self._pieces[number].order
            assert order is not None
            here = pieces == number
            found[here] = self._starts[number] + logical_offsets(offsets[here], *order)
        return found


@dataclass(frozen=True, slots=True)
class Samples:
    """What was read of one state at save."""

    _plan: SamplePlan
    _placed: _PlacedDraw
    _lines: torch.Tensor

    def changed_in(self, data: torch.Tensor) -> list[int]:
        """Return the numbers of the tensors that differ from an image's ``data``, flat uint8."""
        draw = self._placed.draw
        found: set[int] = set()
        lines = self._lines.view(torch.uint8)
        for first, last, remainder, rows in draw.groups:
            end = remainder + (len(data) - remainder) // LINE_BYTES * LINE_BYTES
            held = data[remainder:end].view(-1, LINE_BYTES).index_select(0, rows)
            if not torch.equal(held, lines[first:last]):
                found |= _where(draw.lines_of[first:last], (held != lines[first:last]).any(1))
        if draw.in_order < len(lines):
            pieces = np.repeat(draw.lines_of[draw.in_order :], LINE_BYTES)
            offsets = draw.lines_at[draw.in_order :, None] + np.arange(LINE_BYTES)
            at = torch.from_numpy(self._plan.in_image(pieces, offsets.ravel()))
            found |= _where(pieces, data[at] != lines[draw.in_order :].flatten())
        return self._numbers(found)

    def changed_now(self) -> list[int]:
        """Return the numbers of the tensors that differ now, in a few lines of each. Their memory must be there."""
        placed = self._placed
        with torch.inference_mode(False), torch.no_grad():
            lines = placed.memory.lines.index_select(0, placed.now)
            held = self._lines.index_select(0, torch.from_numpy(placed.draw.now))
            if torch.equal(lines, held):
                return []
            pieces = placed.draw.lines_of[placed.draw.now]
            return self._numbers(_where(pieces, (lines != held).any(1)))

    def differ_from(self, others: Samples) -> list[int]:
        """Return the numbers of the tensors that differ from what was read of the same plan, at the same addresses, at
        another time."""
        draw = self._placed.draw
        assert draw is others._placed.draw, "samples of other places cannot be compared"
        return self._numbers(_where(draw.lines_of, (self._lines != others._lines).any(1)))

    def _numbers(self, found: set[int]) -> list[int]:
        return sorted({int(self._plan.numbers[piece]) for piece in found})


class WholeDigests:
    """Pieces that are digested whole at each save."""

    def __init__(self, pieces: Sequence[SampledRange]) -> None:
        self._pieces = pieces
        self.numbers = np.array([p.index for p in pieces], dtype=np.int64)
        self._offsets = np.array([p.offset for p in pieces], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in pieces], dtype=np.int64)
        self._placed: tuple[Integers, ProcessMemory, list[slice]] | None = None

    def digest(self, pointers: array[int]) -> list[int]:
        """Digest the live pieces of tensors at these addresses, given by their numbers."""
        if not self._pieces:
            return []
        addresses = _addresses(pointers, self.numbers) + self._offsets
        if self._placed is None or not np.array_equal(self._placed[0], addresses):
            memory = ProcessMemory(int(addresses.min()), int((addresses + self._sizes).max()))
            starts = (addresses - memory.low).tolist()
            slices = [*map(slice, starts, (addresses - memory.low + self._sizes).tolist())]
            self._placed = addresses, memory, slices
        _, memory, slices = self._placed
        return [*map(_digest, map(memory.view.__getitem__, slices))]

    def changed_in(self, data: memoryview, digests: Sequence[int]) -> set[int]:
        """Return the numbers of the tensors whose pieces differ from an image's ``data``."""
        return {
            piece.index
            for piece, digest in zip(self._pieces, digests, strict=True)
            if _digest(_held(piece, data)) != digest
        }

    def differ(self, digests: Sequence[int], others: Sequence[int]) -> set[int]:
        """Return the numbers of the tensors whose digests of two times differ."""
        both = zip(self._pieces, digests, others, strict=True)
        return {piece.index for piece, digest, other in both if digest != other}


class RotatingDigests:
    """Pieces cut into ranges that are digested in rotation: for each its tensor, where it begins there and in the
    image's data, and its length."""

    def __init__(self, pieces: Sequence[SampledRange]) -> None:
        self._orders = {p.index: p.order for p in pieces if p.order is not None}
        self._ranges = [
            (piece.index, piece.offset + at, piece.start + at, length)
            for piece in pieces
            for at, length in _cut(piece.bytes)
        ]
        self._next = 0
        ends = {index: offset + length for index, offset, _, length in self._ranges}
        self._numbers = np.array([*ends], dtype=np.int64)
        self._ends = np.array([*ends.values()], dtype=np.int64)
        self._placed: tuple[Integers, ProcessMemory] | None = None

    def digest(self, pointers: array[int], budget_s: float | None) -> dict[int, int]:
        """Digest live ranges for so many seconds, or all of them; return the digests by the numbers of the ranges."""
        if not self._ranges:
            return {}
        memory = self._memory(pointers)
        digests: dict[int, int] = {}
        deadline = math.inf if budget_s is None else time.perf_counter() + budget_s
        while len(digests) < len(self._ranges) and time.perf_counter() < deadline:
            number = self._next
            index, offset, _, length = self._ranges[number]
            at = pointers[index] + offset - memory.low
            digests[number] = _digest(memory.view[at : at + length])
            self._next = (number + 1) % len(self._ranges)
        return digests

    def _memory(self, pointers: array[int]) -> ProcessMemory:
        addresses = _addresses(pointers, self._numbers)
        if self._placed is None or not np.array_equal(self._placed[0], addresses):
            low, high = int(addresses.min()), int((addresses + self._ends).max())
            self._placed = addresses, ProcessMemory(low, high)
        return self._placed[1]

    def changed_in(self, data: memoryview, digests: Mapping[int, int]) -> set[int]:
        """Return the numbers of the tensors whose ranges differ from an image's ``data``."""
        found = set()
        rearranged: tuple[int, memoryview] | None = None
        for number, digest in sorted(digests.items()):
            index, offset, start, length = self._ranges[number]
            held = data[start : start + length]
            if index in self._orders:
                if rearranged is None or rearranged[0] != index:
                    rearranged = index, as_in_memory(data[start - offset :], *self._orders[index])
                held = rearranged[1][offset : offset + length]
            if _digest(held) != digest:
                found.add(index)
        return found


_digest = xxhash.xxh3_64_intdigest


def _held(piece: SampledRange, data: memoryview) -> memoryview:
    """Return the bytes of a piece in an image's ``data``, as they lie in memory."""
    if piece.order is not None:
        return as_in_memory(data[piece.start :], *piece.order)
    return data[piece.start : piece.start + piece.bytes]


class DeviceSums:
    """Sums over tensors that lie on one device, taken in the order of the caller's work there.

    A sum is of the tensor's bytes as 64-bit integers, and of those left over; or of its elements as integers where they
    do not lie in order; modulo 2**64. The host waits for nothing; the sums are read when they are compared.
    """

    def __init__(
        self, stream: CopyStream, tensors: Sequence[tuple[int, int, torch.Tensor]]
    ) -> None:
        """``tensors`` are those that are captured lazily, each with its number and where it begins in the image's
        data."""
        self._stream = stream
        self._at: list[tuple[int, int, int, int]] = []
        sums: list[torch.Tensor] = []

        def add_up() -> None:
            for index, start, tensor in tensors:
                for at, integers in _integers(tensor):
                    sums.append(integers.sum(dtype=torch.int64))
                    item = integers.element_size()
                    self._at.append((index, start + at, integers.numel(), item))

        self._sums: torch.Tensor | None = None
        try:
            stream.for_caller(add_up)
            if sums:
                stream.for_caller(lambda: setattr(self, "_sums", torch.stack(sums)))
        except torch.OutOfMemoryError:
            logger.warning(
                "save: the device has no memory left to compare the image with the state"
            )

    def changed_in(self, data: memoryview) -> list[int]:
        """Return the numbers of the tensors that differ from an image's ``data``."""
        if self._sums is None:
            return []
        read: list[list[int]] = []
        sums = self._sums
        self._stream.enqueue(lambda: read.append(sums.cpu().tolist())).wait()
        found = set()
        for (index, start, count, item), expected in zip(self._at, read[0], strict=True):
            held = torch.frombuffer(data, dtype=INTEGERS[item], offset=start, count=count)
            if int(held.sum(dtype=torch.int64)) != expected:
                found.add(index)
        return sorted(found)


def _integers(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the memory of a tensor as integers, each part with where it begins in the tensor's bytes."""
    flat = as_bytes(tensor)
    if flat is None:
        yield 0, as_integers(tensor.detach())
        return
    whole = 0 if flat.data_ptr() % 8 else len(flat) // 8 * 8
    if whole:
        yield 0, flat[:whole].view(torch.int64)
    if whole < len(flat):
        yield whole, flat[whole:]


def _addresses(pointers: array[int], numbers: Integers) -> Integers:
    """Return the addresses of tensors, given by their numbers."""
    return np.frombuffer(pointers, dtype=np.uint64).astype(np.int64)[numbers]


def _alignment(piece: SampledRange) -> tuple[bool, int]:
    return piece.order is not None, piece.start % LINE_BYTES


def _lines_of(pieces: Sequence[SampledRange]) -> Integers:
    """Return how many lines of each piece are read, at most: the two of the barrier of one that is digested whole; of
    others so many that their distance is that of LINES_MAX in the whole tensor, unless that is too many in all."""
    sizes = np.array([p.bytes for p in pieces], dtype=np.int64)
    _, of = np.unique(np.array([p.index for p in pieces]), return_inverse=True)
    shares = sizes / np.bincount(of, weights=sizes)[of]
    wanted = np.maximum(LINES_MIN, np.ceil((LINES_MAX - 2) * shares).astype(np.int64) + 2)
    wanted[[p.order is not None for p in pieces]] *= 2  # in memory, and as they are read
    wanted[sizes <= WHOLE_BYTES] = NOW_LINES
    total = int(np.minimum(sizes // LINE_BYTES, wanted).sum())
    return wanted if total <= LINES_ALL else np.maximum(NOW_LINES, wanted * LINES_ALL // total)


def _spread_lines(nth: Integers, counts: Integers, whole: Integers, phase: float) -> Integers:
    """Return the offset, in bytes, of the ``nth`` of so many lines of a piece that has ``whole`` lines: the first, the
    last, and the others between, at distances that grow."""
    share = (nth - 1 + phase) / np.maximum(1, counts - 2)
    lines = ((share + GROWTH * (share * share - share)) * whole).astype(np.int64)
    lines = np.where(nth == 0, 0, np.where(nth == counts - 1, whole - 1, lines))
    return np.where(counts == whole, nth, lines) * LINE_BYTES


def logical_offsets(
    offsets: Integers, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> Integers:
    """Turn offsets in the memory of a dense tensor into those in its elements' own order, both in bytes."""
    left, byte = np.divmod(offsets, item_bytes)
    contiguous = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = np.zeros_like(left)
    for dim in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[dim] > 1:
            at, left = np.divmod(left, strides[dim])
            found += at * contiguous[dim]
    return found * item_bytes + byte


def memory_offsets(
    offsets: Integers, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> Integers:
    """Turn offsets in the elements' own order into those in memory: the inverse of ``logical_offsets``."""
    element, byte = np.divmod(offsets, item_bytes)
    places = np.unravel_index(element, shape)
    return sum(at * stride for at, stride in zip(places, strides, strict=True)) * item_bytes + byte


def as_in_memory(
    data: memoryview, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> memoryview:
    """Return the bytes of a dense tensor as they lie in memory, given those in its elements' own order."""
    unit = min(item_bytes, 8)
    count = math.prod(shape) * item_bytes // unit
    held = torch.frombuffer(data, dtype=INTEGERS[unit], count=count)
    dims = sorted(range(len(shape)), key=lambda d: -strides[d])
    found = held.view(*shape, item_bytes // unit).permute(*dims, len(shape)).contiguous()
    return memoryview(found.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def spread(counts: Integers) -> tuple[Integers, Integers]:
    """Return, for each of ``sum(counts)`` items, its group, and its index in the group."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - (np.cumsum(counts) - counts)[of]


def _grouped(places: Integers) -> tuple[_AlignedLines, ...]:
    """Group lines, given by their places in the image's data, which have runs of one remainder."""
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


def _cut(length: int) -> list[tuple[int, int]]:
    return [(at, min(RANGE_BYTES, length - at)) for at in range(0, length, RANGE_BYTES)]


def _where(tensors: Integers, differs: torch.Tensor) -> set[int]:
    return {*map(int, np.unique(tensors[differs.numpy()]))}


class CheckPlan:
    """How the images of one cutting are checked against the state at save."""

    def __init__(self, cutting: Segmentation, view: StateView) -> None:
        pieces = [piece for segment in cutting.segments for piece in segment]
        here = [
            SampledRange(p.index, p.source_start, p.start, p.end - p.start, _order(view, p.index))
            for p in pieces
            if p.place == HOST and is_sampled(view, p.index)
        ]
        self.whole = WholeDigests([piece for piece in here if piece.bytes <= WHOLE_BYTES])
        self.samples = SamplePlan(here, _lines_of(here))
        self.ranges = RotatingDigests([piece for piece in here if piece.bytes > WHOLE_BYTES])
        self.on_devices: dict[int, dict[int, int]] = {}
        """By place, of the tensors there: their numbers, and where each begins in the image's data."""
        for p in pieces:
            if p.place != HOST:
                self.on_devices.setdefault(p.place, {})[p.index] = p.start - p.source_start

    def begin(
        self,
        sources: TensorSources,
        streams: Mapping[int, CopyStream],
        budget_s: float | None,
    ) -> ImageCheck:
        """Read what the image of a state must hold, on the thread that saves. ``budget_s`` is the time that digests may
        take; None: all is digested."""
        return ImageCheck(
            plan=self,
            whole=self.whole.digest(sources.pointers),
            samples=self.samples.take(sources.pointers),
            digests=self.ranges.digest(sources.pointers, budget_s),
            sums=tuple(
                DeviceSums(
                    streams[place], [(n, start, sources.tensor(n)) for n, start in starts.items()]
                )
                for place, starts in self.on_devices.items()
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCheck:
    """What was read of one state at save, to compare its image with. See the module."""

    plan: CheckPlan
    whole: Sequence[int]
    samples: Samples | None
    digests: Mapping[int, int]
    sums: tuple[DeviceSums, ...]

    def changed_in(self, data: memoryview) -> list[int]:
        """Return the numbers of the tensors that differ from the image's ``data``."""
        found = self.plan.ranges.changed_in(data, self.digests)
        found |= self.plan.whole.changed_in(data, self.whole)
        if self.samples is not None:
            with torch.inference_mode(False):
                found.update(self.samples.changed_in(torch.frombuffer(data, dtype=torch.uint8)))
        for sums in self.sums:
            found.update(sums.changed_in(data))
        return sorted(found)

    def changed_now(self) -> list[int]:
        """Return the numbers of the tensors that differ from the live ones, in a few lines of each."""
        return [] if self.samples is None else self.samples.changed_now()


def is_sampled(view: StateView, index: int) -> bool:
    """Say whether samples of a tensor in host memory can be found again in its image."""
    return view.plain[index] or view.strides[index] is not None


def _order(view: StateView, index: int) -> Order | None:
    strides = view.strides[index]
    if strides is None:
        return None
    return tuple(view.shapes[index]), strides, view.dtypes[index].itemsize
