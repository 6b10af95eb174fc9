"""The source tensors of one image: reading their bytes, and detecting changes during capture.

Two properties reveal a change without reading bytes: the version counter, which most torch operations increment, and
the address, which changes with the storage. An operation increments the counter when it ends, so the barrier reads it
again, when no operation is in progress.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import attrgetter
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from tierfall.core.image.segments import Segment, Segmentation, SegmentPart
from tierfall.core.runtime.memory_copies import MemoryCopies, copy_on_host
from tierfall.core.runtime.pinned import cut_at, locked_bounds
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.state.view import StateView
from tierfall.core.tensors import names
from tierfall.core.tensors.tensors import as_bytes, copy_whole, to_bytes
from tierfall.core.types.errors import StateChangedError

_NO_VERSION = -1
_READ = torch.empty(0, device="cpu")
"""Stands for a tensor that is dropped."""
_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr
_IS_CPU = attrgetter("is_cpu")
Offsets = NDArray[np.uint64]
_Watched = tuple[Sequence[int], list[torch.Tensor], list[int]]
SMALL_BYTES = 256 << 10
"""Longer parts are copied by torch, which has several threads."""


class TensorSources:
    """The tensors of a view, with their version counters at the time of construction."""

    def __init__(self, view: StateView, segmentation: Segmentation) -> None:
        lazy, self._tensors = segmentation.lazy, view.sources
        if segmentation.on_devices:
            # An alias keeps the memory until the device has read it: a training may replace ``.data`` at any time. In
            # host memory that is seen by the address, since samples may miss what is written to the old memory.
            self._tensors = view.sources.copy()
            for index in segmentation.on_devices:
                self._tensors[index] = self._tensors[index].detach()
        self._is_plain = segmentation.is_plain
        self._names = view.names
        self._trails = view.trails
        self.pointers = view.pointers
        lazy_tensors = [*map(self._tensors.__getitem__, lazy)]
        self._watched: _Watched = lazy, lazy_tensors, _versions(lazy_tensors)

    def tensor(self, index: int) -> torch.Tensor:
        return self._tensors[index]

    @property
    def lazy_tensors(self) -> Sequence[torch.Tensor]:
        """The lazily captured tensors; empty after ``release``."""
        return self._watched[1]

    def release(self) -> None:
        self._tensors, self._watched = [], ([], [], [])

    def release_some(self, numbers: Collection[int]) -> None:
        """Drop the tensors of these numbers, which have been read."""
        watched, tensors, versions = self._watched
        kept = [number not in numbers for number in watched]
        self._watched = (
            [*compress(watched, kept)],
            [*compress(tensors, kept)],
            [*compress(versions, kept)],
        )
        self._tensors = [_READ if n in numbers else each for n, each in enumerate(self._tensors)]

    # Reading ---------------------------------------------------------------------------------------

    def copy(
        self, segment: Segment, data: torch.Tensor, *, stream: CopyStream | None = None
    ) -> None:
        """Copy a segment to its position in ``data``, the bytes of the image behind its header. ``stream`` is its
        device's: this call, in that stream's work, waits for no copy."""
        to, of, non_blocking = [], [], stream is not None
        bounds = locked_bounds()
        with torch.inference_mode(False), torch.no_grad():
            for piece in self._copy_memory(segment, data, segment.columns[1], stream):
                source, place = self._held(piece.index), data[piece.start : piece.end]
                plain = self._is_plain[piece.index]
                if source.is_cpu and plain:
                    to.append(place)
                    of.append(_bytes_of(source, piece))
                elif source.is_cpu:
                    copy_whole(place, source, non_blocking=non_blocking)
                else:
                    found = _bytes_of(source, piece) if plain else to_bytes(source)
                    for start, end in cut_at(bounds, place.data_ptr(), place.numel()):
                        to.append(place[start:end])
                        of.append(found[start:end])
            if len(to) == 1:
                to[0].copy_(of[0], non_blocking=non_blocking)
            elif to:
                torch._foreach_copy_(to, of, non_blocking=non_blocking)

    def copy_within(
        self, segment: Segment, memory: torch.Tensor, offsets: Offsets, stream: CopyStream
    ) -> None:
        """Copy parts to flat memory of their own device; called in the work of the stream."""
        to = dict(zip((part.start for part in segment), offsets.tolist(), strict=True))
        with torch.inference_mode(False), torch.no_grad():
            for part in self._copy_memory(segment, memory, offsets, stream):
                at = to[part.start]
                target = memory[at : at + part.end - part.start]
                source = self._held(part.index)
                if self._is_plain[part.index]:
                    target.copy_(_bytes_of(source, part))
                else:
                    copy_whole(target, source)

    def _copy_memory(
        self,
        segment: Segment,
        memory: torch.Tensor,
        offsets: Offsets,
        stream: CopyStream | None,
    ) -> Segment:
        """Copy plain tensors by address, or enqueue that in one call, where that is possible; return the other parts.
        In host memory only small ones: torch uses several threads for others."""
        numbers, _, sizes, starts = segment.columns
        chosen = self._is_plain[numbers]
        if stream is None:
            chosen &= sizes <= SMALL_BYTES
        if not chosen.any() or not (stream is None or stream.copies_memory(memory)):
            return segment
        numbers = numbers[chosen]
        tensors = [*map(self._tensors.__getitem__, numbers.tolist())]
        if stream is None:
            tensors = [*map(torch.Tensor.detach, tensors)]  # alive until the copies are made
            if not all(map(_IS_CPU, tensors)):
                return segment
        addresses = self._check_addresses(tensors, numbers)
        copies = MemoryCopies(
            targets=offsets[chosen] + np.uint64(memory.data_ptr()),
            sources=addresses + starts[chosen],
            sizes=sizes[chosen],
            on_device=memory.is_cuda,
        )
        if stream is None:
            copy_on_host(copies)
        else:
            stream.copy_memory(copies)
        return Segment(compress(segment, ~chosen))

    def _check_addresses(self, tensors: Sequence[torch.Tensor], numbers: Offsets) -> Offsets:
        """The tensors' addresses. StateChangedError where memory was replaced: it may not be there any more."""
        now = np.fromiter(map(_ADDRESS, tensors), dtype=np.uint64, count=len(tensors))
        changed = now != np.frombuffer(self.pointers, dtype=np.uint64)[numbers]
        if changed.any():
            self.raise_changed(np.unique(numbers[changed]).tolist())
        return now

    def _held(self, index: int) -> torch.Tensor:
        """An alias that keeps a tensor's memory alive while it is read: an optimizer may replace ``.data`` of its state
        at any time, which frees the old memory. StateChangedError if that has already happened."""
        alias = self._tensors[index].detach()
        if alias.data_ptr() != self.pointers[index]:
            self.raise_changed([index])
        return alias

    # Changes -----------------------------------------------------------------------------------------

    def changed(self) -> list[int]:
        """The numbers of lazily captured tensors whose version counter or address has changed since construction."""
        numbers, tensors, old_versions = self._watched  # another thread may call ``release``
        if not tensors:
            return []
        versions = _versions(tensors)
        pointers = [*map(torch.Tensor.data_ptr, tensors)]
        expected = [*map(self.pointers.__getitem__, numbers)]
        if versions == old_versions and pointers == expected:
            return []
        rows = zip(numbers, versions, old_versions, pointers, expected, strict=True)
        return [
            index
            for index, version, old_version, pointer, old_pointer in rows
            if pointer != old_pointer
            or (version != old_version and _NO_VERSION not in (version, old_version))
        ]

    def raise_changed(self, changed: Sequence[int]) -> NoReturn:
        """Raise StateChangedError for the tensors of these numbers."""
        more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
        verb = "were" if more else "was"
        raise StateChangedError(
            f"save: {names.path(self._trails[changed[0]])}{more} {verb} changed between save() and the next optimizer "
            "step; nothing of this step is kept. Change it only inside optimizer.step(), or wrap it in "
            "tierfall.item(..., changes='anytime'), or call wait_captured() before the change, or set capture.mode to "
            "blocking",
            tuple(self._names[index] for index in changed),
        )


def _bytes_of(source: torch.Tensor, piece: SegmentPart) -> torch.Tensor:
    """The bytes of a part of a plain tensor."""
    flat = as_bytes(source)
    assert flat is not None, "a plain tensor has bytes"
    return flat[piece.source_start : piece.source_start + piece.end - piece.start]


def _versions(sources: Sequence[torch.Tensor]) -> list[int]:
    try:
        # 0, and no error, for tensors detached from an inference tensor
        return [*map(_VERSION, sources)]
    except RuntimeError:  # an inference tensor is among them
        return [*map(_version, sources)]


def _version(tensor: torch.Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else tensor._version
