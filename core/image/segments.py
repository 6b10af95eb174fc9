"""Division of an image's tensors into segments, each copied by one call: planned once per layout.

A tensor is divided at chunk boundaries, so that a chunk can be complete before the tensor is. Small tensors are
batched, so that one call copies many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tierfall.core.image.layout import Layout
from tierfall.core.state.view import StateView
from tierfall.core.types.values import Changes

SEGMENT_BYTES = 16 << 20
BATCH_BYTES = 1 << 20
Columns = NDArray[np.uint64]
HOST = -1
"""The place of host memory, and of memory that is read like host memory."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """A byte range of tensor number ``index``: from ``source_start`` of the tensor to ``start`` of the image's data.

    ``place`` is HOST or the number of its device.
    """

    index: int
    start: int
    end: int
    source_start: int
    place: int


class Segment(tuple[SegmentPart, ...]):
    """Parts that one call copies, all on one device."""

    @property
    def place(self) -> int:
        return self[0].place

    @cached_property
    def size_bytes(self) -> int:
        return sum(part.end - part.start for part in self)

    @cached_property
    def columns(self) -> Columns:
        """Of each part: tensor number, start in the image's data, bytes, start in the tensor."""
        rows = [(p.index, p.start, p.end - p.start, p.source_start) for p in self]
        return np.array(rows, dtype=np.uint64).reshape(-1, 4).T.copy()

    def joined(self, others: Sequence[Segment]) -> Segment:
        """This segment and others as one."""
        if not others:
            return self
        all_segments = (self, *others)
        found = Segment(chain.from_iterable(all_segments))
        found.size_bytes = sum(each.size_bytes for each in all_segments)
        found.columns = np.concatenate([each.columns for each in all_segments], axis=1)
        return found


class Segmentation:
    """The segments of one layout: ``eager`` is copied before save() returns, ``segments`` are captured lazily, both
    in image order; ``lazy`` are the numbers of the lazily captured tensors, ``lazy_bytes`` their size.

    All parts of a segment are on one device; ``places`` are the devices by tensor number, ``on_devices`` the
    numbers of the tensors that are not in host memory. ``mostly_on_devices``: they have most of the bytes. ``is_plain``
    is the view's column.
    """

    def __init__(
        self,
        layout: Layout,
        view: StateView,
        chunk_bytes: int,
        places: Sequence[int] = (),
        lazy: Sequence[bool] | None = None,
    ) -> None:
        """``lazy``: by tensor number, whether it may be captured lazily (None: if only an optimizer changes it).
        Without ``places`` all tensors are in host memory."""
        if lazy is None:
            lazy = tuple(changes is Changes.ON_STEP for changes in view.changes)
        self._layout = layout
        self._key = (view.plain, lazy, places)
        self._places = places
        self.is_plain = np.array(view.plain, dtype=np.bool_)
        self.chunk_bytes = chunk_bytes
        self.eager: list[Segment] = []
        self.segments: list[Segment] = []
        self._divide(view, lazy)
        self.on_devices = frozenset(n for n, place in enumerate(places) if place != HOST)
        parts = [part for segment in (*self.eager, *self.segments) for part in segment]
        sizes = [(part.end - part.start) * (1 if part.place == HOST else -1) for part in parts]
        self.mostly_on_devices = sum(sizes) < 0
        self.lazy = tuple(sorted({p.index for segment in self.segments for p in segment}))
        self.lazy_bytes = sum(p.end - p.start for segment in self.segments for p in segment)
        geometry = layout.image_plan(chunk_bytes)
        self.chunk_range = geometry.chunk_range
        self.missing = [0] * geometry.chunk_count
        for index in range(1, len(self.missing)):
            start, end = self.chunk_range(index)
            self.missing[index] = end - start

    def matches(
        self, layout: Layout, view: StateView, places: Sequence[int], lazy: Sequence[bool]
    ) -> bool:
        """Whether this is the segmentation for these arguments."""
        return layout is self._layout and self._key == (view.plain, lazy, places)

    @property
    def data_start(self) -> int:
        return self._layout.data_start

    def _divide(self, view: StateView, lazy: Sequence[bool]) -> None:
        batches: dict[tuple[bool, int], list[SegmentPart]] = {}
        batched: dict[tuple[bool, int], int] = {}
        kinds = {True: self.segments, False: self.eager}
        for placement in self._layout.placements:
            index, start, end = placement.index, placement.start, placement.end
            if start == end:
                continue
            place = self._place(index)
            first = placement.part[0] if placement.part else 0
            for piece in self._pieces(index, start, end, first, plain=view.plain[index]):
                size, batch = piece.end - piece.start, (lazy[index], place)
                if batched.get(batch, 0) + size > BATCH_BYTES and batch in batches:
                    kinds[batch[0]].append(Segment(batches.pop(batch)))
                    batched[batch] = 0
                batches.setdefault(batch, []).append(piece)
                batched[batch] = batched.get(batch, 0) + size
        for (is_lazy, _), pieces in batches.items():
            kinds[is_lazy].append(Segment(pieces))
        for segments in kinds.values():
            segments.sort(key=lambda segment: segment[0].start)

    def _pieces(
        self, index: int, start: int, end: int, first: int, *, plain: bool
    ) -> list[SegmentPart]:
        if not plain:
            return [SegmentPart(index, start, end, 0, self._place(index))]
        pieces = []
        at = start
        while at < end:
            stop = min(end, (at // self.chunk_bytes + 1) * self.chunk_bytes, at + SEGMENT_BYTES)
            place = self._place(index)
            pieces.append(SegmentPart(index, at, stop, first + at - start, place))
            at = stop
        return pieces

    def _place(self, index: int) -> int:
        return self._places[index] if self._places else HOST
