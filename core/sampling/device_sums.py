"""Sums over tensors on a device, taken in the order of the caller's work there and read later.

The host does not wait when a sum is taken, only when it is read.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from tierfall.core.image.segments import SegmentPart
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.sampling import sum_kernel
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import INTEGERS, as_bytes, as_integers

logger = logging.getLogger("tierfall")

WORD_BYTES = 8


def _sums_of(integers: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Enqueue the sum of each tensor of integers (int64); None without any."""
    sums = [tensor.sum(dtype=torch.int64) for tensor in integers]
    return torch.stack(sums) if sums else None


class _PendingSums:
    """Sums of integers modulo 2**64, on one device. ``read`` may be called by several threads."""

    def __init__(
        self, stream: CopyStream, add_up: Callable[[], torch.Tensor | None], purpose: str
    ) -> None:
        """``add_up`` enqueues the sums (int64); it is called with the device current. ``purpose`` is for the log
        message if the device has no memory left; there are no sums then."""
        self._stream = stream
        self._sums: torch.Tensor | None = None
        self._values: list[int] | None = None
        self._lock = threading.Lock()

        def keep() -> None:
            self._sums = add_up()

        try:
            stream.run_on_caller_stream(keep)
        except torch.OutOfMemoryError:
            logger.warning("save: the device has no memory left to compare %s", purpose)

    def read(self) -> list[int] | None:
        """The sums as signed integers, after waiting for the device; None if there are none."""
        with self._lock:
            sums = self._sums
            if self._values is None and sums is not None:
                values: list[list[int]] = []
                self._stream.enqueue(lambda: values.append(sums.cpu().tolist())).wait()
                self._values = values[0]
            return self._values


class Tensors(Protocol):
    """The tensors of a state, and their addresses, by number."""

    @property
    def pointers(self) -> array[int]: ...

    def tensor(self, number: int, /) -> torch.Tensor: ...


class DeviceRanges:
    """What is summed of a state's tensors on one device: the parts of plain tensors, each in words, and the elements of
    each other tensor."""

    def __init__(self, parts: Sequence[SegmentPart], view: StateView) -> None:
        self.words = sorted(
            (part for part in parts if view.plain[part.index]), key=lambda part: part.start
        )
        self.others = [
            (part, INTEGERS[min(WORD_BYTES, view.dtypes[part.index].itemsize)])
            for part in parts
            if not view.plain[part.index]
        ]
        rows = [(p.index, p.start, p.end - p.start, p.source_start) for p in self.words]
        self._numbers, self.starts, self._sizes, self._source_starts = (
            np.array(rows, dtype=np.int64).reshape(-1, 4).T
        )

    @property
    def parts(self) -> list[SegmentPart]:
        """The parts in the order of their sums."""
        return [*self.words, *(part for part, _ in self.others)]

    def begin(self, stream: CopyStream, sources: Tensors, purpose: str) -> DeviceSums:
        """Enqueue the sums of one state on the caller's stream. ``purpose`` is as in ``_PendingSums``."""

        def add_up() -> torch.Tensor | None:
            others = (sources.tensor(part.index).detach() for part, _ in self.others)
            elements = (as_integers(each.resolve_conj().resolve_neg()) for each in others)
            found = [self._add_up_words(sources), _sums_of(elements)]
            return torch.cat([sums for sums in found if sums is not None])

        return DeviceSums(self, _PendingSums(stream, add_up, purpose))

    def _add_up_words(self, sources: Tensors) -> torch.Tensor | None:
        if not self.words:
            return None
        pointers = np.frombuffer(sources.pointers, dtype=np.uint64)
        addresses = pointers[self._numbers] + self._source_starts.astype(np.uint64)
        device = sources.tensor(self.words[0].index).device
        sums = sum_kernel.add_up(addresses, self._sizes, device)
        return _sums_of(_as_words(p, sources) for p in self.words) if sums is None else sums


class DeviceSums:
    """The sums over one state's tensors on one device, to compare with its image, or with other ranks."""

    def __init__(self, ranges: DeviceRanges, sums: _PendingSums) -> None:
        self._ranges = ranges
        self._sums = sums

    def read(self) -> list[int] | None:
        """As ``_PendingSums.read``."""
        return self._sums.read()

    def changed_in_chunk(self, data: memoryview, offset: int) -> Iterator[int]:
        """The numbers of the tensors whose words differ from a chunk, which is at ``offset`` of the image's data."""
        parts = self._ranges.words
        first, last = np.searchsorted(self._ranges.starts, (offset, offset + len(data))).tolist()
        if first == last or (sums := self._sums.read()) is None:
            return
        for part, expected in zip(parts[first:last], sums[first:last], strict=True):
            words = sum_words(data[part.start - offset : part.end - offset])
            if words != expected % (1 << 64):
                yield part.index

    def changed_in(self, data: memoryview) -> Iterator[int]:
        """The numbers of the tensors whose elements differ from the image's ``data``."""
        others = self._ranges.others
        if not others or (sums := self._sums.read()) is None:
            return
        for (part, dtype), expected in zip(others, sums[len(self._ranges.words) :], strict=True):
            in_image = torch.frombuffer(data[part.start : part.end], dtype=dtype)
            if int(in_image.sum(dtype=torch.int64)) != expected:
                yield part.index


def sum_words(data: memoryview) -> int:
    """The sum of the 64-bit words of some bytes, as ``sum_kernel.add_up`` makes it. NumPy uses this thread alone."""
    whole = len(data) // WORD_BYTES * WORD_BYTES
    words = np.frombuffer(data[:whole], dtype=np.uint64)
    return (int(np.add.reduce(words)) + int.from_bytes(data[whole:], "little")) % (1 << 64)


def _as_words(part: SegmentPart, sources: Tensors) -> torch.Tensor:
    """The words of a part of a plain tensor, for devices without the kernel."""
    flat = as_bytes(sources.tensor(part.index))
    assert flat is not None, "a plain tensor has bytes"
    size = part.end - part.start
    words = flat[part.source_start : part.source_start + size]
    if size % WORD_BYTES or words.data_ptr() % WORD_BYTES:
        room = -(-size // WORD_BYTES) * WORD_BYTES
        padded = words.new_zeros(room)
        padded[:size].copy_(words)
        words = padded
    return words.view(torch.int64)
