"""Sums over tensors on a device, taken in the order of the caller's work there and read later.

The host does not wait when a sum is taken, only when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from tierfall.core.image.sources import TensorSources
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.sampling import sum_kernel
from tierfall.core.tensors.tensors import INTEGERS, as_bytes, as_integers

logger = logging.getLogger("tierfall")

WORD_BYTES = 8


def sums_of(integers: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Enqueue the sum of each tensor of integers (int64); None without any."""
    sums = [tensor.sum(dtype=torch.int64) for tensor in integers]
    return torch.stack(sums) if sums else None


class PendingSums:
    """Sums of integer tensors modulo 2**64, on one device."""

    def __init__(
        self, stream: CopyStream, add_up: Callable[[], torch.Tensor | None], purpose: str
    ) -> None:
        """``add_up`` enqueues the sums (int64); it is called with the device current. ``purpose`` is for the log
        message if the device has no memory left; there are no sums then."""
        self._stream = stream
        self._sums: torch.Tensor | None = None

        def keep() -> None:
            self._sums = add_up()

        try:
            stream.run_on_caller_stream(keep)
        except torch.OutOfMemoryError:
            logger.warning("save: the device has no memory left to compare %s", purpose)

    def read(self) -> list[int] | None:
        """The sums as signed integers, after waiting for the device; None if there are none."""
        sums = self._sums
        if sums is None:
            return None
        values: list[list[int]] = []
        self._stream.enqueue(lambda: values.append(sums.cpu().tolist())).wait()
        return values[0]


class DeviceRange(NamedTuple):
    """Tensor ``number`` on a device, at ``start`` of the image's data. ``plain``: its memory is its bytes in the
    image."""

    number: int
    start: int
    size_bytes: int
    plain: bool


class DeviceSums:
    """Sums over the lazily captured tensors on one device, to compare with an image.

    Each tensor has a sum of its bytes as 64-bit integers, and one of the bytes left over. A tensor without a byte view
    has one sum of its elements as integers.
    """

    def __init__(
        self, stream: CopyStream, ranges: Sequence[DeviceRange], sources: TensorSources
    ) -> None:
        self._summed: list[tuple[int, int, int, int]] = []
        pointers = sources.pointers

        def add_up() -> torch.Tensor | None:
            whole = [
                (each.number, each.start, each.size_bytes // WORD_BYTES, WORD_BYTES)
                for each in ranges
                if each.plain
                and each.size_bytes >= WORD_BYTES
                and not pointers[each.number] % WORD_BYTES
            ]
            first = sum_kernel.add_up(
                [pointers[row[0]] for row in whole],
                [row[2] for row in whole],
                sources.tensor(ranges[0].number).device,
            )
            self._summed = [] if first is None else whole
            rest = sums_of(integers({row[0] for row in self._summed}))
            return torch.cat([sums for sums in (first, rest) if sums is not None])

        def integers(done: set[int]) -> Iterator[torch.Tensor]:
            for index, start, size_bytes, _ in ranges:
                if index in done and not size_bytes % WORD_BYTES:
                    continue
                for at, part in _integers(sources.tensor(index)):
                    if index not in done or at:
                        self._summed.append((index, start + at, part.numel(), part.element_size()))
                        yield part

        self._sums = PendingSums(stream, add_up, "the image with the state")

    def changed_in(self, data: memoryview) -> list[int]:
        """The numbers of the tensors that differ from an image's ``data``."""
        sums = self._sums.read()
        if sums is None:
            return []
        found = set()
        for (index, start, count, item), expected in zip(self._summed, sums, strict=True):
            in_image = torch.frombuffer(data, dtype=INTEGERS[item], offset=start, count=count)
            if int(in_image.sum(dtype=torch.int64)) != expected:
                found.add(index)
        return sorted(found)


def _integers(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the memory of a tensor as integers, in parts with their byte offsets."""
    flat = as_bytes(tensor)
    if flat is None:
        yield 0, as_integers(tensor.detach())
        return
    whole = 0 if flat.data_ptr() % WORD_BYTES else len(flat) // WORD_BYTES * WORD_BYTES
    if whole:
        yield 0, flat[:whole].view(torch.int64)
    if whole < len(flat):
        yield whole, flat[whole:]
