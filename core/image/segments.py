"""How an image's tensors are cut into segments, each copied by one call: planned once per layout.

A tensor is cut where chunks end, so that a chunk can be final before the tensor is; small ones are put together, so
that one call copies many. What a cut knows of a tensor is where it lies: in the state's list, in the image, and in
which memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.format.records import chunk_count, chunk_range
from tierfall.core.image.layout import Layout
from tierfall.core.state.view import StateView
from tierfall.core.types.values import Changes

SEGMENT_BYTES = 16 << 20
BATCH_BYTES = 1 << 20
HOST = -1
"""The place of what lies in host memory, or in memory that is read as if it did."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Bytes of tensor number ``index``, which go to ``start`` in the data and begin at ``source_start`` of its own.

    ``slot`` is the tensor's place in the image; ``whole`` says that these are all its bytes; ``place`` is HOST or the
    device that they lie on.
    """

    slot: int
    index: int
    start: int
    end: int
    source_start: int
    whole: bool
    place: int


Segment = tuple[SegmentPart, ...]


class Segmentation:
    """The segments of one layout: ``at_once`` what is copied before save() returns, ``segments`` what is captured
    lazily, both in image order; ``lazy`` are the numbers of the latter's tensors.

    A segment lies in one memory. ``places`` says for each tensor in which.
    """

    def __init__(
        self,
        layout: Layout,
        view: StateView,
        chunk_bytes: int,
        places: Sequence[int] = (),
        lazy: Sequence[bool] | None = None,
    ) -> None:
        """``lazy`` says which tensors may be captured lazily: without it those that only an optimizer changes. Without
        ``places`` all lies in host memory."""
        if lazy is None:
            lazy = tuple(changes is Changes.ON_STEP for changes in view.changes)
        self._layout = layout
        self._key = (view.plain, lazy, places)
        self._places = places
        self.chunk_bytes = chunk_bytes
        self.at_once: list[Segment] = []
        self.segments: list[Segment] = []
        self._cut(view, lazy)
        self.lazy = tuple(sorted({p.index for segment in self.segments for p in segment}))
        self.missing = [0] * chunk_count(layout.image_bytes, layout.data_start, chunk_bytes)
        for index in range(1, len(self.missing)):
            start, end = self.chunk_range(index)
            self.missing[index] = end - start

    def serves(
        self, layout: Layout, view: StateView, places: Sequence[int], lazy: Sequence[bool]
    ) -> bool:
        """Say whether this is how a view of that layout is to be cut."""
        return layout is self._layout and self._key == (view.plain, lazy, places)

    @property
    def data_start(self) -> int:
        return self._layout.data_start

    def chunk_range(self, index: int) -> tuple[int, int]:
        layout = self._layout
        return chunk_range(index, layout.image_bytes, layout.data_start, self.chunk_bytes)

    def _cut(self, view: StateView, lazy: Sequence[bool]) -> None:
        batches: dict[tuple[bool, int], list[SegmentPart]] = {}
        batched: dict[tuple[bool, int], int] = {}
        kinds = {True: self.segments, False: self.at_once}
        for number, slot in enumerate(self._layout.slots):
            index, start, end = slot.index, slot.start, slot.end
            if start == end:
                continue
            place = self._place(index)
            # What is copied at once on a device is cloned there, whole.
            plain = view.plain[index] and (lazy[index] or place == HOST)
            for piece in self._pieces(number, index, start, end, plain=plain):
                size, batch = piece.end - piece.start, (lazy[index], place)
                if batched.get(batch, 0) + size > BATCH_BYTES and batch in batches:
                    kinds[batch[0]].append(tuple(batches.pop(batch)))
                    batched[batch] = 0
                batches.setdefault(batch, []).append(piece)
                batched[batch] = batched.get(batch, 0) + size
        for (is_lazy, _), pieces in batches.items():
            kinds[is_lazy].append(tuple(pieces))
        for segments in kinds.values():
            segments.sort(key=lambda segment: segment[0].start)

    def _pieces(
        self, slot: int, index: int, start: int, end: int, *, plain: bool
    ) -> list[SegmentPart]:
        if not plain:
            return [SegmentPart(slot, index, start, end, 0, True, self._place(index))]
        pieces = []
        at = start
        while at < end:
            stop = min(end, (at // self.chunk_bytes + 1) * self.chunk_bytes, at + SEGMENT_BYTES)
            whole = stop - at == end - start
            pieces.append(SegmentPart(slot, index, at, stop, at - start, whole, self._place(index)))
            at = stop
        return pieces

    def _place(self, index: int) -> int:
        return self._places[index] if self._places else HOST
