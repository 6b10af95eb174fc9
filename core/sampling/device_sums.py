"""Sums over tensors on a device, taken in the order of the caller's work there and read later.

The host does not wait when a sum is taken, only when it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tierfall.core.runtime.streams import CopyStream
from tierfall.core.tensors.tensors import INTEGERS, as_bytes, as_integers

logger = logging.getLogger("tierfall")


class PendingSums:
    """Sums of integer tensors modulo 2**64, on one device."""

    def __init__(
        self, stream: CopyStream, integers: Callable[[], Iterable[torch.Tensor]], purpose: str
    ) -> None:
        """``integers`` returns the tensors to sum; it is called with the device current. ``purpose`` is for the log
        message if the device has no memory left; there are no sums then."""
        self._stream = stream
        self._sums: torch.Tensor | None = None

        def add_up() -> None:
            sums = [tensor.sum(dtype=torch.int64) for tensor in integers()]
            if sums:
                self._sums = torch.stack(sums)

        try:
            stream.run_on_caller_stream(add_up)
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


class DeviceSums:
    """Sums over the lazily captured tensors on one device, to compare with an image.

    Each tensor has a sum of its bytes as 64-bit integers, and one of the bytes left over. A tensor without a byte view
    has one sum of its elements as integers.
    """

    def __init__(
        self, stream: CopyStream, tensors: Sequence[tuple[int, int, torch.Tensor]]
    ) -> None:
        """``tensors`` are (number, offset in the image's data, tensor)."""
        self._summed: list[tuple[int, int, int, int]] = []

        def integers() -> Iterator[torch.Tensor]:
            for index, start, tensor in tensors:
                for at, part in _integers(tensor):
                    self._summed.append((index, start + at, part.numel(), part.element_size()))
                    yield part

        self._sums = PendingSums(stream, integers, "the image with the state")

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
    whole = 0 if flat.data_ptr() % 8 else len(flat) // 8 * 8
    if whole:
        yield 0, flat[:whole].view(torch.int64)
    if whole < len(flat):
        yield whole, flat[whole:]
