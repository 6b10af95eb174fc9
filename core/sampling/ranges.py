"""Byte ranges of tensors in host memory, and digests of them.

Short ranges are digested whole at each save, long ones in rotation. For a tensor that is dense but not contiguous, the
bytes in an image, which are in the order of elements, are rearranged to the order in memory before a comparison.
"""

from __future__ import annotations

import ctypes
import math
import time
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
"""Ranges up to this size are digested whole: that is faster than reading their lines."""
RANGE_BYTES = 1 << 20
"""Maximum size of a range for one digest in rotation."""


class ProcessMemory:
    """Arrays over this process's memory between two addresses; owns nothing. The caller ensures that what it reads is
    mapped. ``lines`` are rows of LINE_BYTES whose addresses are ``remainder`` modulo LINE_BYTES."""

    def __init__(self, low: int, high: int, *, remainder: int = 0) -> None:
        self.low = low - (low - remainder) % LINE_BYTES
        length = -(-(high - self.low) // LINE_BYTES) * LINE_BYTES
        self.view = memoryview((ctypes.c_char * length).from_address(self.low)).cast("B")
        with torch.inference_mode(False):
            self.bytes = torch.from_numpy(np.frombuffer(self.view, dtype=np.uint8))
            self.lines = self.bytes.view(torch.int64).view(-1, LINE_BYTES // 8)


@dataclass(frozen=True, slots=True)
class SampledRange:
    """A range of a tensor in host memory that is sampled: the tensor's number in the state, the range's offsets in the
    tensor and in the image's data, and its length in bytes. ``order``: shape, strides and item size of a tensor that is
    dense but not contiguous, whose only range is all of it."""

    index: int
    offset: int
    start: int
    bytes: int
    order: MemoryOrder | None


_digest = xxhash.xxh3_64_intdigest


class WholeDigests:
    """Ranges that are digested whole at each save."""

    def __init__(self, ranges: Sequence[SampledRange]) -> None:
        self._ranges = ranges
        self.numbers = np.array([p.index for p in ranges], dtype=np.int64)
        self._offsets = np.array([p.offset for p in ranges], dtype=np.int64)
        self._sizes = np.array([p.bytes for p in ranges], dtype=np.int64)
        self._placed: tuple[Integers, ProcessMemory, list[slice]] | None = None

    def digest(self, pointers: array[int]) -> list[int]:
        """Digest the live ranges of tensors; ``pointers`` are addresses by tensor number."""
        if not self._ranges:
            return []
        addresses = addresses_of(pointers, self.numbers) + self._offsets
        if self._placed is None or not np.array_equal(self._placed[0], addresses):
            memory = ProcessMemory(int(addresses.min()), int((addresses + self._sizes).max()))
            starts = (addresses - memory.low).tolist()
            slices = [*map(slice, starts, (addresses - memory.low + self._sizes).tolist())]
            self._placed = addresses, memory, slices
        _, memory, slices = self._placed
        return [*map(_digest, map(memory.view.__getitem__, slices))]

    def changed_in(self, data: memoryview, digests: Sequence[int]) -> set[int]:
        """The numbers of the tensors whose ranges differ from an image's ``data``."""
        return {
            item.index
            for item, digest in zip(self._ranges, digests, strict=True)
            if _digest(_in_image(item, data)) != digest
        }

    def differ(self, digests: Sequence[int], others: Sequence[int]) -> set[int]:
        """The numbers of the tensors whose digests, taken at two times, differ."""
        rows = zip(self._ranges, digests, others, strict=True)
        return {item.index for item, digest, other in rows if digest != other}


class RotatingDigests:
    """Long ranges, split into ranges of at most RANGE_BYTES that are digested in rotation."""

    def __init__(self, ranges: Sequence[SampledRange]) -> None:
        self._orders = {p.index: p.order for p in ranges if p.order is not None}
        self._ranges = [
            (item.index, item.offset + at, item.start + at, length)
            for item in ranges
            for at, length in _split(item.bytes)
        ]
        self._next = 0
        ends = {index: offset + length for index, offset, _, length in self._ranges}
        self._numbers = np.array([*ends], dtype=np.int64)
        self._ends = np.array([*ends.values()], dtype=np.int64)
        self._placed: tuple[Integers, ProcessMemory] | None = None

    def digest(self, pointers: array[int], budget_s: float | None) -> dict[int, int]:
        """Digest live ranges for ``budget_s`` seconds (None: all of them); return the digests by range number."""
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
        addresses = addresses_of(pointers, self._numbers)
        if self._placed is None or not np.array_equal(self._placed[0], addresses):
            low, high = int(addresses.min()), int((addresses + self._ends).max())
            self._placed = addresses, ProcessMemory(low, high)
        return self._placed[1]

    def changed_in(self, data: memoryview, digests: Mapping[int, int]) -> set[int]:
        """The numbers of the tensors whose ranges differ from an image's ``data``."""
        found = set()
        rearranged: tuple[int, memoryview] | None = None
        for number, digest in sorted(digests.items()):
            index, offset, start, length = self._ranges[number]
            stored = data[start : start + length]
            if index in self._orders:
                if rearranged is None or rearranged[0] != index:
                    rearranged = index, as_in_memory(data[start - offset :], *self._orders[index])
                stored = rearranged[1][offset : offset + length]
            if _digest(stored) != digest:
                found.add(index)
        return found


def _in_image(item: SampledRange, data: memoryview) -> memoryview:
    """The bytes of a range in an image's ``data``, in the order of the tensor's memory."""
    if item.order is not None:
        return as_in_memory(data[item.start :], *item.order)
    return data[item.start : item.start + item.bytes]


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


def _split(length: int) -> list[tuple[int, int]]:
    return [(at, min(RANGE_BYTES, length - at)) for at in range(0, length, RANGE_BYTES)]
