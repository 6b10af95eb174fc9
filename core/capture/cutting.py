"""How an image's tensors are cut into segments, each copied by one call: planned once per layout.

A tensor is cut where chunks end, so that a chunk can be final before the tensor is; small ones are put together, so
that one call copies many. Where a tensor lies in the state's list and in the image is all that a cut knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfall.core.image import Layout, StateView
from tierfall.core.records import chunk_count, chunk_range
from tierfall.core.values import Changes

SEGMENT_BYTES = 16 << 20
BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of tensor number ``index``, which go to ``start`` in the data and begin at ``source_start`` of its own.

    ``slot`` is the tensor's place in the image; ``whole`` says that these are all its bytes.
    """

    slot: int
    index: int
    start: int
    end: int
    source_start: int
    whole: bool


Segment = tuple[Piece, ...]


class Cutting:
    """The segments of one layout: ``at_once`` what may change at any time, ``segments`` the rest, in image order."""

    def __init__(self, layout: Layout, view: StateView, chunk_bytes: int) -> None:
        self._layout = layout
        self._key = (view.plain, view.changes)
        self.chunk_bytes = chunk_bytes
        self.at_once: list[Piece] = []
        self.segments: list[Segment] = []
        self._cut(view)
        self.missing = [0] * chunk_count(layout.image_bytes, layout.data_start, chunk_bytes)
        for index in range(1, len(self.missing)):
            start, end = self.chunk_range(index)
            self.missing[index] = end - start

    def serves(self, layout: Layout, view: StateView) -> bool:
        """Say whether this is how a view of that layout is to be cut."""
        return layout is self._layout and self._key == (view.plain, view.changes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        layout = self._layout
        return chunk_range(index, layout.image_bytes, layout.data_start, self.chunk_bytes)

    def _cut(self, view: StateView) -> None:
        batch: list[Piece] = []
        batched = 0
        for slot, place in enumerate(self._layout.slots):
            index, start, end = place.index, place.start, place.end
            if start == end:
                continue
            if view.changes[index] is Changes.ANYTIME:
                self.at_once.append(Piece(slot, index, start, end, 0, True))
                continue
            for piece in self._pieces(slot, index, start, end, plain=view.plain[index]):
                size = piece.end - piece.start
                if batch and batched + size > BATCH_BYTES:
                    self.segments.append(tuple(batch))
                    batch, batched = [], 0
                batch.append(piece)
                batched += size
        if batch:
            self.segments.append(tuple(batch))

    def _pieces(self, slot: int, index: int, start: int, end: int, *, plain: bool) -> list[Piece]:
        if not plain:
            return [Piece(slot, index, start, end, 0, True)]
        pieces = []
        at = start
        while at < end:
            stop = min(end, (at // self.chunk_bytes + 1) * self.chunk_bytes, at + SEGMENT_BYTES)
            whole = stop - at == end - start
            pieces.append(Piece(slot, index, at, stop, at - start, whole))
            at = stop
        return pieces
