"""Byte ranges of tensors in host memory, and digests of them.

Ranges of medium length are digested at each save, long ones in rotation. If a tensor is dense but not contiguous, the
bytes of its image, which are in the order of elements, are rearranged to the order in memory before a comparison.
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
WHOLE_LINES = 16
"""Ranges of up to so many lines are read whole: one call reads all of them."""
WHOLE_BYTES = 32 << 10
"""Longer ranges up to this size are digested at each save: that is faster than reading their lines."""
DIGEST_BYTES = 2 << 20
"""Bytes of long ranges that are digested at a save, in rotation: about half a millisecond."""


class ProcessMemory:
    """Arrays over this process's memory between two addresses; owns nothing. The caller ensures that what it reads is
    mapped. ``lines`` are rows of LINE_BYTES, ``bytes`` are flat."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low - low % LINE_BYTES
        length = -(-(high - self.low) // LINE_BYTES) * LINE_BYTES
        self.view = memoryview((ctypes.c_char * length).from_address(self.low)).cast("B")
        with torch.inference_mode(False):
            rows = np.frombuffer(self.view, dtype=np.int64).reshape(-1, LINE_BYTES // 8)
            self.lines = torch.from_numpy(rows)
            self.bytes = self.lines.view(torch.uint8).view(-1)


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
    """Digests of ranges of live tensors, to compare with an image: of some at each save, of the others in rotation."""

    def __init__(self, always: Sequence[SampledRange], in_turn: Sequence[SampledRange]) -> None:
        self._ranges = [*always, *in_turn]
        self._always = self._next = len(always)
        self._numbers = np.array([p.index for p in self._ranges], dtype=np.int64)
        self._offsets = np.array([p.offset for p in self._ranges], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in self._ranges], dtype=np.int64)
        self._placed: tuple[Integers, ProcessMemory, list[slice]] | None = None
        """The addresses of the last call, which usually are those of the next one, and the ranges there."""

    def digest(self, pointers: array[int], most_bytes: int | None) -> dict[int, int]:
        """Digest some ranges, and the next others in rotation, as many as ``most_bytes`` hold (None: all). ``pointers``
        are addresses by tensor number. Return the digests by range number."""
        chosen = self._choose(most_bytes)
        if not chosen:
            return {}
        memory, slices = self._place(addresses_of(pointers, self._numbers))
        views = map(memory.view.__getitem__, map(slices.__getitem__, chosen))
        return dict(zip(chosen, map(_digest, views), strict=True))

    def _choose(self, most_bytes: int | None) -> Sequence[int]:
        if most_bytes is None:
            return range(len(self._ranges))
        chosen = [*range(self._always)]
        while len(chosen) < len(self._ranges):
            most_bytes -= self._ranges[self._next].bytes
            if most_bytes < 0:
                break
            chosen.append(self._next)
            self._next += 1
            if self._next == len(self._ranges):
                self._next = self._always
        return chosen

    def _place(self, addresses: Integers) -> tuple[ProcessMemory, list[slice]]:
        if self._placed is None or not np.array_equal(self._placed[0], addresses):
            starts = addresses + self._offsets
            memory = ProcessMemory(int(starts.min()), int((starts + self._sizes).max()))
            starts -= memory.low
            slices = [*map(slice, starts.tolist(), (starts + self._sizes).tolist())]
            self._placed = addresses, memory, slices
        return self._placed[1:]

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


def addresses_of(pointers: array[int], numbers: Integers) -> Integers:
    """The addresses of tensors by their numbers."""
    return np.frombuffer(pointers, dtype=np.int64).take(numbers)


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
