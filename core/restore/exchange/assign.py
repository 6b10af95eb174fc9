"""Assignment: which rank reads which chunk for all ranks of a restore, and which ranks receive it. Pure: the result is
the same on all ranks.

Ranks request byte ranges of images; ranks that request the same are one group. Every chunk with a requested byte is
read once: by a rank that has it on the fastest tier, if possible one that requests it, and of those the one with the
least to read so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierfall.core.load.build import Fill

HEADER = 0
"""The chunk that is an image's header."""

Holders = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
"""For each image: tiers by their number in the chain, fastest first, each with the ranks that can read it there."""


@dataclass(frozen=True, slots=True, order=True)
class RequestedRanges:
    """What is requested of one image, whose chunks have ``chunk_bytes``. ``edges`` are the starts and ends, in turn, of
    ascending byte ranges of its data; no two have bytes of one chunk. ``chunk_bytes`` 0 requests the header."""

    chunk_bytes: int
    edges: tuple[int, ...] = ()


class RequestedBytes(NamedTuple):
    """The bytes of a chunk, ``low`` to ``high`` of the image's data, that the ranks of a group request."""

    group: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that request the same, by image."""

    ranks: tuple[int, ...]
    requested: Mapping[int, RequestedRanges]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAssignment:
    """A chunk, which is the ``number``-th that ``reader`` reads, for the groups in ``spans``."""

    image: int
    chunk: int
    reader: int
    number: int
    spans: tuple[RequestedBytes, ...]

    @property
    def low(self) -> int:
        return min(span.low for span in self.spans)

    @property
    def high(self) -> int:
        return max(span.high for span in self.spans)


def name_of(image: int, chunk: int) -> str:
    """Return the name of a chunk in messages."""
    what = "the header" if chunk == HEADER else f"chunk {chunk}"
    return f"{what} of rank {image}'s image"


class UnassignedError(Exception):
    """No rank is left that could read a chunk."""

    def __init__(self, image: int, chunk: int) -> None:
        super().__init__(name_of(image, chunk))
        self.image, self.chunk = image, chunk


def requested_ranges(fills: Iterable[Fill], chunk_bytes: int) -> RequestedRanges:
    """Return the bytes of ``fills``, which are in image order; gaps within a chunk are closed."""
    return RequestedRanges(chunk_bytes, _joined(((f.start, f.end) for f in fills), chunk_bytes))


def remaining_ranges(spans: Iterable[tuple[int, int]], chunk_bytes: int) -> RequestedRanges:
    """Return the ranges of chunks that are still to be requested; ``spans`` are in image order."""
    return RequestedRanges(chunk_bytes, _joined(spans, chunk_bytes))


def _joined(ranges: Iterable[tuple[int, int]], chunk_bytes: int) -> tuple[int, ...]:
    edges: list[int] = []
    for start, end in ranges:
        if start == end:
            continue
        if edges and (start <= edges[-1] or start // chunk_bytes == (edges[-1] - 1) // chunk_bytes):
            edges[-1] = max(edges[-1], end)
        else:
            edges += (start, end)
    return tuple(edges)


def assign(
    groups: Sequence[RankGroup],
    holders: Holders,
    excluded: Collection[tuple[int, int, int]] = frozenset(),
) -> list[ChunkAssignment]:
    """Choose the reader of each chunk that a group requests, image after image.

    ``excluded`` are image, chunk and rank of each chunk that a rank need not try to read. Raises UnassignedError where
    no other rank holds a chunk.
    """
    readers = _Readers(holders, excluded)
    members = [frozenset(group.ranks) for group in groups]
    items: list[ChunkAssignment] = []
    for image in sorted({image for group in groups for image in group.requested}):
        for chunk, spans in sorted(_chunks(groups, image).items()):
            reader = readers.choose(image, chunk, tuple(s.group for s in spans), members)
            bytes = max(s.high for s in spans) - min(s.low for s in spans)
            number = readers.charge(reader, max(1, bytes))
            items.append(
                ChunkAssignment(
                    image=image, chunk=chunk, reader=reader, number=number, spans=tuple(spans)
                )
            )
    return items


def _chunks(groups: Sequence[RankGroup], image: int) -> dict[int, list[RequestedBytes]]:
    """Return, for each chunk, the bytes of it that the groups request."""
    found: dict[int, list[RequestedBytes]] = {}
    for number, group in enumerate(groups):
        if image not in group.requested:
            continue
        size, edges = group.requested[image].chunk_bytes, group.requested[image].edges
        if not size:
            found.setdefault(HEADER, []).append(RequestedBytes(number, 0, 0))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            for index in range(start // size, (end - 1) // size + 1):
                low, high = max(start, index * size), min(end, (index + 1) * size)
                found.setdefault(1 + index, []).append(RequestedBytes(number, low, high))
    return found


class _Readers:
    """The bytes that each rank has to read so far. Queues find the least busy of many ranks without a look at all."""

    def __init__(self, holders: Holders, excluded: Collection[tuple[int, int, int]]) -> None:
        self._holders = holders
        self._excluded: dict[tuple[int, int], set[int]] = {}
        for image, chunk, rank in excluded:
            self._excluded.setdefault((image, chunk), set()).add(rank)
        self._load: dict[int, int] = {}
        self._count: dict[int, int] = {}
        self._queues: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}

    def choose(
        self,
        image: int,
        chunk: int,
        wanting: tuple[int, ...],
        members: Sequence[frozenset[int]],
    ) -> int:
        failed = self._excluded.get((image, chunk), set())
        for _, holding in self._holders.get(image, ()):
            if failed:
                able = tuple(rank for rank in holding if rank not in failed)
                if able:
                    return min(_preferred(able, wanting, members), key=self._busy)
            elif holding:
                return self._least(tuple(holding), wanting, members)
        raise UnassignedError(image, chunk)

    def charge(self, rank: int, bytes: int) -> int:
        """Add a chunk to what a rank reads; return its number among those."""
        number = self._count.get(rank, 0)
        self._count[rank] = number + 1
        self._load[rank] = self._load.get(rank, 0) + bytes
        return number

    def _busy(self, rank: int) -> tuple[int, int, int]:
        return self._load.get(rank, 0), self._count.get(rank, 0), rank

    def _least(
        self, able: tuple[int, ...], wanting: tuple[int, ...], members: Sequence[frozenset[int]]
    ) -> int:
        queue = self._queues.get((able, wanting))
        if queue is None:
            queue = [(0, rank) for rank in _preferred(able, wanting, members)]
            heapq.heapify(queue)
            self._queues[able, wanting] = queue
        while True:  # loads only rise: the first whose load is current is the least
            load, rank = queue[0]
            now = self._load.get(rank, 0)
            if load == now:
                return rank
            heapq.heapreplace(queue, (now, rank))


def _preferred(
    able: Sequence[int], wanting: Sequence[int], members: Sequence[frozenset[int]]
) -> list[int]:
    return [rank for rank in able if any(rank in members[g] for g in wanting)] or list(able)


# One rank's part -------------------------------------------------------------------------------------


class ChunkDelivery(NamedTuple):
    """The bytes of an item that a rank requests, whichever rank reads it."""

    item: ChunkAssignment
    low: int
    high: int


def reads_of(items: Iterable[ChunkAssignment], rank: int) -> list[ChunkAssignment]:
    """Return the items that a rank reads, in its order."""
    return [item for item in items if item.reader == rank]


def deliveries_to(
    items: Iterable[ChunkAssignment], groups: Sequence[RankGroup], rank: int, world_size: int
) -> list[ChunkDelivery]:
    """Return what a rank receives from others, in the order in which it receives it.

    First what each of them reads first, then what each reads second. A reader sends its n-th chunk once all have its
    earlier ones, and a receiver waits for nothing later before that: so ranks do not wait for each other in a circle.
    Each rank begins with the one after it, so that not all of them begin with the same.
    """
    mine = [each for each in requests_of(items, groups, rank) if each.item.reader != rank]
    mine.sort(
        key=lambda delivery: (delivery.item.number, (delivery.item.reader - rank) % world_size)
    )
    return mine


def requests_of(
    items: Iterable[ChunkAssignment], groups: Sequence[RankGroup], rank: int
) -> Iterator[ChunkDelivery]:
    """Yield what a rank requests of the items, whichever rank reads it."""
    own = {number for number, group in enumerate(groups) if rank in group.ranks}
    for item in items:
        for span in item.spans:
            if span.group in own:
                yield ChunkDelivery(item, span.low, span.high)


def receivers_of(item: ChunkAssignment, groups: Sequence[RankGroup]) -> list[tuple[int, int, int]]:
    """Return the receivers of an item and their bytes: rank, low, high; in the order of ranks after its reader."""
    receivers = [
        (rank, span.low, span.high)
        for span in item.spans
        for rank in groups[span.group].ranks
        if rank != item.reader
    ]
    return sorted(receivers, key=lambda t: (t[0] < item.reader, t[0]))
