"""Byte ranges of tensors in host memory, and digests of them.

Short ranges are digested at each save, long ones in rotation. If a tensor is dense but not contiguous, the bytes of its
image, which are in the order of elements, are rearranged to the order in memory before a comparison.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tierfall.core.tensors.tensors import INTEGERS

Integers = NDArray[np.int64]
MemoryOrder = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and item size in bytes."""

LINE_BYTES = 64
WHOLE_BYTES = 32 << 10
"""Ranges up to this size are digested at each save: that is faster than reading their lines."""
DIGEST_BYTES = 2 << 20
"""Bytes of long ranges that are digested at a save, in rotation: about half a millisecond."""


class ProcessMemory:
    """Arrays over this process's memory between two addresses; owns nothing. The caller ensures that what it reads is
    mapped. ``lines`` are rows of LINE_BYTES."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low - low % LINE_BYTES
        length = -(-(high - self.low) // LINE_BYTES) * LINE_BYTES
        self.view = memoryview((ctypes.c_char * length).from_address(self.low)).cast("B")
        with torch.inference_mode(False):
            rows = np.frombuffer(self.view, dtype=np.int64).reshape(-1, LINE_BYTES // 8)
            self.lines = torch.from_numpy(rows)


@dataclass(frozen=True, slots=True)
class SampledRange:
    """A range of a tensor in host memory that is sampled: the tensor's number in the state, the range's offsets in the
    tensor and in the image's data, and its length in bytes. ``order``: shape, strides and item size of a tensor that is
    dense but not contiguous; the bytes of its image are in another order than those of its memory."""

    index: int
    offset: int
    start: int
    bytes: int
    order: MemoryOrder | None

    def split(self, most_bytes: int) -> list[SampledRange]:
        """The same bytes as ranges of at most ``most_bytes``."""
        return [
            SampledRange(
                self.index,
                self.offset + at,
                self.start + at,
                min(most_bytes, self.bytes - at),
                self.order,
            )
            for at in range(0, self.bytes, most_bytes)
        ]


_digest = xxhash.xxh3_64_intdigest


class RangeDigests:
    """Digests of ranges of live tensors, to compare with the same ranges at another time, or in an image."""

    def __init__(self, ranges: Sequence[SampledRange]) -> None:
        self._ranges = ranges
        self._numbers = np.array([p.index for p in ranges], dtype=np.int64)
        self._offsets = np.array([p.offset for p in ranges], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in ranges], dtype=np.int64)
        self._distinct = np.unique(self._numbers)
        self._pointers: array[int] | None = None
        """The addresses of the last call: usually those of the next one."""
        self._placed: tuple[Integers, ProcessMemory, list[slice]] | None = None
        self._next = 0

    def rotate(self, most_bytes: int | None) -> Sequence[int]:
        """The numbers of the next ranges in rotation, as many as ``most_bytes`` hold (None: all ranges)."""
        if most_bytes is None:
            return range(len(self._ranges))
        chosen: list[int] = []
        while len(chosen) < len(self._ranges):
            most_bytes -= self._ranges[self._next].bytes
            if most_bytes < 0:
                break
            chosen.append(self._next)
            self._next = (self._next + 1) % len(self._ranges)
        return chosen

    def digest(self, pointers: array[int], chosen: Sequence[int] | None = None) -> dict[int, int]:
        """Digest the ``chosen`` ranges (None: all); ``pointers`` are addresses by tensor number. Return the digests by
        range number."""
        if chosen is None:
            chosen = range(len(self._ranges))
        if not chosen:
            return {}
        if self._placed is None or self._pointers != pointers:
            self._place(pointers)
        assert self._placed is not None
        _, memory, slices = self._placed
        views = map(memory.view.__getitem__, map(slices.__getitem__, chosen))
        return dict(zip(chosen, map(_digest, views), strict=True))

    def _place(self, pointers: array[int]) -> None:
        self._pointers = pointers
        found = addresses_of(pointers, self._distinct)
        if self._placed is not None and np.array_equal(self._placed[0], found):
            return
        addresses = addresses_of(pointers, self._numbers) + self._offsets
        memory = ProcessMemory(int(addresses.min()), int((addresses + self._sizes).max()))
        starts = addresses - memory.low
        slices = [*map(slice, starts.tolist(), (starts + self._sizes).tolist())]
        self._placed = found, memory, slices

    def changed_in(self, data: memoryview, digests: Mapping[int, int]) -> set[int]:
        """The numbers of the tensors whose ranges have other digests in an image's ``data``."""
        found = set()
        arranged: tuple[int, memoryview] | None = None
        for number, digest in digests.items():
            item = self._ranges[number]
            stored = data[item.start : item.start + item.bytes]
            if item.order is not None:
                if arranged is None or arranged[0] != item.index:
                    whole = data[item.start - item.offset :]
                    arranged = item.index, as_in_memory(whole, *item.order)
                stored = arranged[1][item.offset : item.offset + item.bytes]
            if _digest(stored) != digest:
                found.add(item.index)
        return found

    def differ(self, digests: Mapping[int, int], others: Mapping[int, int]) -> set[int]:
        """The numbers of the tensors whose digests, taken at two times, differ."""
        return {self._ranges[n].index for n, digest in digests.items() if others[n] != digest}


def addresses_of(pointers: array[int], numbers: Integers) -> Integers:
    """The addresses of tensors by their numbers."""
    return np.frombuffer(pointers, dtype=np.int64)[numbers]


def logical_offsets(
    offsets: Integers, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> Integers:
    """Convert byte offsets in the memory of a dense tensor to offsets in the order of its elements."""
    rest, byte = np.divmod(offsets, item_bytes)
    contiguous = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = np.zeros_like(rest)
    for dim in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if shape[dim] > 1:
            at, rest = np.divmod(rest, strides[dim])
            found += at * contiguous[dim]
    return found * item_bytes + byte


def memory_offsets(
    offsets: Integers, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> Integers:
    """The inverse of ``logical_offsets``."""
    element, byte = np.divmod(offsets, item_bytes)
    places = np.unravel_index(element, shape)
    return sum(at * stride for at, stride in zip(places, strides, strict=True)) * item_bytes + byte


def as_in_memory(
    data: memoryview, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> memoryview:
    """Rearrange the bytes of a dense tensor from the order of its elements to the order of its memory."""
    unit = min(item_bytes, 8)
    count = math.prod(shape) * item_bytes // unit
    elements = torch.frombuffer(data, dtype=INTEGERS[unit], count=count)
    dims = sorted(range(len(shape)), key=lambda d: -strides[d])
    found = elements.view(*shape, item_bytes // unit).permute(*dims, len(shape)).contiguous()
    return memoryview(found.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
