"""What ranks say to each other in an exchange, and what rank 0 makes of it: pure, and made of what JSON holds.

Everything that grows with ranks, images or chunks is said as *runs*, start and end in turn, and what many ranks say
alike is said once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from tierfall.core.restore.exchange.assign import Holders, RankGroup, RequestedRanges


class NextPhase(StrEnum):
    """What comes after the ranks have said what they want."""

    LOCAL = "local"
    HEADERS = "headers"
    CHUNKS = "chunks"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadChunks:
    """What a rank could not read of an image: chunks, and why; ``retryable``: it may well be there."""

    rank: int
    image: int
    chunks: tuple[int, ...]
    retryable: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRequest:
    """What one rank says. ``planning``: it wants headers, and does not know yet what else. ``alone``: of all images it
    wants its own only. ``sees``, said once: the images that each tier, by its place in the chain, has for it."""

    wants: Mapping[int, RequestedRanges] = field(default_factory=dict)
    planning: bool = False
    alone: bool = False
    sees: Mapping[int, Iterable[int]] | None = None
    failed: Sequence[UnreadChunks] = ()
    stopped: str | None = None

    def members(self) -> dict[str, Any]:
        sees = self.sees
        return {
            "wants": {
                str(image): [want.chunk_bytes, *want.runs] for image, want in self.wants.items()
            },
            "planning": self.planning,
            "alone": self.alone,
            "sees": None if sees is None else {str(t): to_runs(x) for t, x in sees.items()},
            "failed": [[f.image, to_runs(f.chunks), f.retryable, f.text] for f in self.failed],
            "stopped": self.stopped,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeDecision:
    """What all do next. ``stopped`` is the rank that ended the exchange, with its reason."""

    next: NextPhase
    groups: tuple[RankGroup, ...]
    holders: Holders | None
    failed: tuple[UnreadChunks, ...]
    stopped: tuple[int, str] | None


PlaceOf = Callable[[int, int], int | None]
"""Says where the copies are that a rank sees on a tier, which is named by its place in the chain: on which node; None
where all see the same."""


def decide(bodies: Mapping[int, Mapping[str, Any]], place_of: PlaceOf) -> dict[str, Any]:
    """Bring together what all ranks have said; ``read_answer`` reads what is returned."""
    stopped = next(([r, b["stopped"]] for r, b in bodies.items() if b["stopped"] is not None), None)
    planning = any(body["planning"] for body in bodies.values())
    seen = None
    if bodies[0]["sees"] is not None:
        seen = _merge_equal(
            {(tier, rank): runs for rank, b in bodies.items() for tier, runs in b["sees"].items()}
        )
    if stopped is not None:
        kind = NextPhase.DONE
    elif seen is not None and not planning and _need_nobody(bodies, seen, place_of):
        kind = NextPhase.LOCAL
    elif planning:
        kind = NextPhase.HEADERS
    else:
        kind = (
            NextPhase.CHUNKS if any(body["wants"] for body in bodies.values()) else NextPhase.DONE
        )
    wants: dict[str, list[int]] = {}
    if kind in (NextPhase.HEADERS, NextPhase.CHUNKS):
        for rank, body in bodies.items():
            if body["wants"] and body["planning"] == planning:
                wants.setdefault(json.dumps(body["wants"], sort_keys=True), []).append(rank)
    return {
        "next": kind.value,
        "groups": [[to_runs(ranks), json.loads(said)] for said, ranks in wants.items()],
        "seen": seen if kind in (NextPhase.HEADERS, NextPhase.CHUNKS) else None,
        "failed": [[rank, *failed] for rank, body in bodies.items() for failed in body["failed"]],
        "stopped": stopped,
    }


def read_answer(said: Mapping[str, Any]) -> ExchangeDecision:
    groups = tuple(
        RankGroup(
            ranks=tuple(from_runs(ranks)),
            wants={
                int(i): RequestedRanges(size, tuple(runs)) for i, (size, *runs) in wants.items()
            },
        )
        for ranks, wants in said["groups"]
    )
    failed = tuple(
        UnreadChunks(rank=r, image=i, chunks=tuple(from_runs(runs)), retryable=again, text=text)
        for r, i, runs, again, text in said["failed"]
    )
    stopped = said["stopped"]
    return ExchangeDecision(
        next=NextPhase(said["next"]),
        groups=groups,
        holders=None if said["seen"] is None else _holders(said["seen"]),
        failed=failed,
        stopped=None if stopped is None else (stopped[0], stopped[1]),
    )


def _merge_equal(said: Mapping[tuple[str, int], list[int]]) -> list[list[Any]]:
    """Say once what several ranks see alike on a tier: tier, images, ranks."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (tier, rank), runs in said.items():
        if runs:
            found.setdefault((tier, tuple(runs)), []).append(rank)
    return [[int(tier), list(runs), to_runs(ranks)] for (tier, runs), ranks in found.items()]


def _need_nobody(
    bodies: Mapping[int, Mapping[str, Any]], seen: Sequence[Sequence[Any]], place_of: PlaceOf
) -> bool:
    """Say whether every rank reads its own image alone, and nobody has a copy of that which the rank itself has not."""
    if not all(body["alone"] for body in bodies.values()):
        return False
    copies: dict[int, set[tuple[int, int | None]]] = {}
    for tier, images, ranks in seen:
        places = {(tier, place_of(tier, rank)) for rank in from_runs(ranks)}
        for image in from_runs(images):
            copies.setdefault(image, set()).update(places)
    return all(
        place == place_of(tier, rank) and _holds(body["sees"].get(str(tier), []), rank)
        for rank, body in bodies.items()
        if body["wants"]
        for tier, place in copies.get(rank, ())
    )


def _holds(runs: Sequence[int], number: int) -> bool:
    return any(a <= number < b for a, b in zip(runs[::2], runs[1::2], strict=True))


def _holders(seen: Sequence[Sequence[Any]]) -> Holders:
    """Make of what is seen on tiers who can read each image. Images that are seen alike share their ranks."""
    found: dict[int, dict[int, list[int]]] = {}
    for number, (tier, images, _) in enumerate(seen):
        for image in from_runs(images):
            found.setdefault(image, {}).setdefault(tier, []).append(number)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def ranks_of(numbers: tuple[int, ...]) -> tuple[int, ...]:
        if numbers not in ranks:
            ranks[numbers] = tuple(sorted(r for n in numbers for r in from_runs(seen[n][2])))
        return ranks[numbers]

    return {
        image: [(tier, ranks_of(tuple(numbers))) for tier, numbers in sorted(tiers.items())]
        for image, tiers in found.items()
    }


def to_runs(numbers: Iterable[int]) -> list[int]:
    """Say numbers as runs: ``0, 1, 2, 5`` is ``[0, 3, 5, 6]``."""
    ordered = sorted(set(numbers))
    if not ordered:
        return []
    edges = [(a + 1, b) for a, b in pairwise(ordered) if b != a + 1]
    return [ordered[0], *(n for edge in edges for n in edge), ordered[-1] + 1]


def from_runs(runs: Sequence[int]) -> Iterable[int]:
    for start, end in zip(runs[::2], runs[1::2], strict=True):
        yield from range(start, end)
