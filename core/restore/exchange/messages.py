"""Messages of an exchange: what each rank requests, and what rank 0 decides that all ranks do next. Pure.

Whatever grows with the number of ranks, images or chunks is held as ranges of numbers, and what many ranks have in
common is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from tierfall.core.ranks.messages import Message
from tierfall.core.restore.exchange.assign import Holders, RankGroup, RequestedRanges


@dataclass(frozen=True, slots=True)
class NumberRanges(Message):
    """A set of whole numbers as ascending ranges: ``edges`` are start and end in turn; 0, 1, 2, 5 is (0, 3, 5, 6)."""

    edges: tuple[int, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> NumberRanges:
        ordered = sorted(set(numbers))
        if not ordered:
            return cls()
        inner = [(a + 1, b) for a, b in pairwise(ordered) if b != a + 1]
        return cls((ordered[0], *(n for edges in inner for n in edges), ordered[-1] + 1))

    def _ranges(self) -> Iterator[range]:
        return map(range, self.edges[::2], self.edges[1::2])

    def __iter__(self) -> Iterator[int]:
        for each in self._ranges():
            yield from each

    def __contains__(self, number: int) -> bool:
        return any(number in each for each in self._ranges())


class NextPhase(StrEnum):
    """What all ranks do next: fill from their own images alone, exchange headers or chunks, or end."""

    LOCAL = "local"
    HEADERS = "headers"
    CHUNKS = "chunks"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadChunks(Message):
    """Chunks of an image that ``rank`` could not read. ``damaged``: no copy is good; else one may be."""

    rank: int
    image: int
    chunks: NumberRanges
    damaged: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest(Message):
    """What one rank requests. ``planning``: it requests headers, and does not know yet what else. ``alone``: it needs
    no image but its own. ``readable``, in the first request only: the images that each tier has for it, by the tier's
    number in the chain. ``stopped``: why this rank ends the exchange."""

    requested: Mapping[int, RequestedRanges] = field(default_factory=dict)
    planning: bool = False
    alone: bool = False
    readable: Mapping[int, NumberRanges] | None = None
    failed: tuple[UnreadChunks, ...] = ()
    stopped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup(Message):
    """Ranks that request the same."""

    ranks: NumberRanges
    requested: Mapping[int, RequestedRanges]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenImages(Message):
    """Images that several ranks can read on a tier, which is given by its number in the chain."""

    tier: int
    images: NumberRanges
    ranks: NumberRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeDecision(Message):
    """What all ranks do next. ``seen`` follows the first requests only. ``stopped`` is the rank that ended the
    exchange, with its reason. ``name`` has not been used before: that of the connections for bytes."""

    next: NextPhase
    groups: tuple[RequestGroup, ...]
    seen: tuple[SeenImages, ...] | None
    failed: tuple[UnreadChunks, ...]
    stopped: tuple[int, str] | None
    name: str

    def rank_groups(self) -> tuple[RankGroup, ...]:
        return tuple(RankGroup(ranks=tuple(g.ranks), requested=g.requested) for g in self.groups)


PlaceOf = Callable[[int, int], int | None]
"""Returns the node on which the copies are that a rank sees on a tier; None where all nodes see the same."""


def decide(
    requests: Mapping[int, ExchangeRequest], place_of: PlaceOf, name: str
) -> ExchangeDecision:
    """Decide, as rank 0, by the requests of all ranks."""
    stopped = next(((r, x.stopped) for r, x in requests.items() if x.stopped is not None), None)
    planning = any(request.planning for request in requests.values())
    seen = None
    if requests[0].readable is not None:
        seen = _merge_equal((t, r, x) for r, one in requests.items() for t, x in _sees(one))
    if stopped is not None:
        phase = NextPhase.DONE
    elif seen is not None and not planning and _is_local(requests, seen, place_of):
        phase = NextPhase.LOCAL
    elif planning:
        phase = NextPhase.HEADERS
    else:
        wanted = any(request.requested for request in requests.values())
        phase = NextPhase.CHUNKS if wanted else NextPhase.DONE
    exchanging = phase in (NextPhase.HEADERS, NextPhase.CHUNKS)
    groups: dict[tuple[tuple[int, RequestedRanges], ...], list[int]] = {}
    for rank, request in requests.items():
        if exchanging and request.requested and request.planning == planning:
            groups.setdefault(tuple(sorted(request.requested.items())), []).append(rank)
    return ExchangeDecision(
        next=phase,
        groups=tuple(
            RequestGroup(ranks=NumberRanges.of(ranks), requested=dict(requested))
            for requested, ranks in groups.items()
        ),
        seen=seen if exchanging else None,
        failed=tuple(failed for request in requests.values() for failed in request.failed),
        stopped=stopped,
        name=name,
    )


def _sees(request: ExchangeRequest) -> Iterable[tuple[int, NumberRanges]]:
    return () if request.readable is None else request.readable.items()


def _merge_equal(seen: Iterable[tuple[int, int, NumberRanges]]) -> tuple[SeenImages, ...]:
    """Group the ranks that see the same images on a tier; given are tier, rank, images."""
    found: dict[tuple[int, NumberRanges], list[int]] = {}
    for tier, rank, images in seen:
        if images.edges:
            found.setdefault((tier, images), []).append(rank)
    return tuple(
        SeenImages(tier=tier, images=images, ranks=NumberRanges.of(ranks))
        for (tier, images), ranks in found.items()
    )


def _is_local(
    requests: Mapping[int, ExchangeRequest], seen: Sequence[SeenImages], place_of: PlaceOf
) -> bool:
    """Return whether every rank needs its own image alone, and no other rank has a copy of it that the rank itself
    does not see."""
    if not all(request.alone for request in requests.values()):
        return False
    copies: dict[int, set[tuple[int, int | None]]] = {}
    for one in seen:
        places = {(one.tier, place_of(one.tier, rank)) for rank in one.ranks}
        for image in one.images:
            copies.setdefault(image, set()).update(places)
    return all(
        place == place_of(tier, rank) and rank in dict(_sees(request)).get(tier, NumberRanges())
        for rank, request in requests.items()
        if request.requested
        for tier, place in copies.get(rank, ())
    )


def holders_of(seen: Sequence[SeenImages]) -> Holders:
    """Return which ranks can read each image on each tier. Images that the same ranks see share their tuple."""
    found: dict[int, dict[int, list[int]]] = {}
    for number, one in enumerate(seen):
        for image in one.images:
            found.setdefault(image, {}).setdefault(one.tier, []).append(number)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def ranks_of(numbers: tuple[int, ...]) -> tuple[int, ...]:
        if numbers not in ranks:
            ranks[numbers] = tuple(sorted(r for n in numbers for r in seen[n].ranks))
        return ranks[numbers]

    return {
        image: [(tier, ranks_of(tuple(numbers))) for tier, numbers in sorted(tiers.items())]
        for image, tiers in found.items()
    }
