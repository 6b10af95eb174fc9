"""The steady state of each tier: whether it keeps up, how much it holds, and what a failure costs. Pure arithmetic.

Saves come at a fixed interval, a stored tier writes at a fixed rate, nothing fails, and deletions take no time. A rule
that depends on more than time, such as one for tags, is named and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tierfall.core.types.units import format_count, format_duration, format_rate, format_size
from tierfall.core.types.values import MEMORY_IMAGES_MAX, TierKind, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.policies.retention import DAY_S, count_kept

HOST_IMAGES = 2
"""Host memory in images if no capacity is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is saved: bytes of one rank's image, seconds between saves, seconds of a step, ranks, nodes. Images of one
    node, and of all, together have ``bytes_of_node`` and ``bytes_of_all``; 0: all images are of the same size."""

    image_bytes: int
    save_every_s: float
    step_s: float | None = None
    ranks: int = 1
    nodes: int = 1
    bytes_of_node: int = 0
    bytes_of_all: int = 0

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def node_bytes(self) -> int:
        return self.bytes_of_node or self.image_bytes * self.ranks_per_node

    @property
    def all_bytes(self) -> int:
        return self.bytes_of_all or self.image_bytes * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The tiers. ``rates`` are bytes per second that one node writes to a tier (missing: unknown); ``shared`` names the
    tiers that all nodes see; ``room`` is what a tier's file system has for the run, in bytes (missing: unknown);
    ``host_bytes`` is one rank's memory (None: HOST_IMAGES)."""

    rules: tuple[TierRules, ...]
    rates: Mapping[str, float] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    room: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int | None = None

    def limit_of(self, rules: TierRules) -> int | None:
        """Return how many bytes a stored tier can hold."""
        limits = (rules.capacity_bytes, self.room.get(rules.name))
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyTier:
    """One tier. Bytes are those that its capacity counts: of one rank in memory, of one node if the tier is not shared,
    else of all ranks.

    A checkpoint of ``copy_bytes`` arrives every ``every_s`` and takes ``copy_s`` to write (None: the rate is unknown):
    the share ``busy`` of the time. A tier with a share above 1 falls behind. Its rules keep ``kept`` checkpoints, and
    ``grows_per_day`` more each day; beside them it holds the one that is being written, ``bytes_max`` in all (None: no
    bound). ``full_s``: when one more finds no room (None: never). ``lost_s``: the most training time between the newest
    copy there and a failure (None: unknown, or no bound).
    """

    name: str
    copy_bytes: int
    every_s: float
    copy_s: float | None = None
    busy: float | None = None
    kept: int
    grows_per_day: float = 0.0
    bytes_max: int | None
    full_s: float | None = None
    lost_s: float | None
    reasons: tuple[str, ...] = ()


def steady_state(chain: Chain, load: Workload) -> tuple[SteadyTier, ...]:
    """Return the steady state of each tier of a run that began with empty ones."""
    return tuple(
        _host(rules, chain, load) if rules.kind is TierKind.HOST else _stored(rules, chain, load)
        for rules in chain.rules
    )


def _host(rules: TierRules, chain: Chain, load: Workload) -> SteadyTier:
    size = load.image_bytes
    images = HOST_IMAGES if chain.host_bytes is None else chain.host_bytes // size
    images = min(images, MEMORY_IMAGES_MAX)
    few = {
        0: f"every save raises CapacityError: memory has no room for an image of {format_size(size)}",
        1: "memory has room for one image: each save waits until the one before it is flushed",
    }
    return SteadyTier(
        name=rules.name,
        copy_bytes=size,
        every_s=load.save_every_s,
        kept=images,
        bytes_max=images * size,
        lost_s=load.save_every_s,
        reasons=(few[images],) if images in few else (),
    )


def _stored(rules: TierRules, chain: Chain, load: Workload) -> SteadyTier:
    size = load.all_bytes if rules.name in chain.shared else load.node_bytes
    every_s = load.save_every_s * rules.flush_every
    rate = chain.rates.get(rules.name)
    copy_s = load.node_bytes / rate if rate else None
    kept, grows, unknown = count_kept(rules, every_s, load.step_s)
    limit = chain.limit_of(rules)
    wanted = math.inf if grows else kept + 1
    room = math.inf if limit is None else limit // size
    full_s = None
    if wanted > room:
        apart_s = DAY_S / grows if grows else every_s
        full_s = max(every_s, (room + 1 - (kept if grows else 0)) * apart_s)
    most = min(wanted, room)
    tier = SteadyTier(
        name=rules.name,
        copy_bytes=size,
        every_s=every_s,
        copy_s=copy_s,
        busy=None if copy_s is None else copy_s / every_s,
        kept=kept,
        grows_per_day=grows,
        bytes_max=None if most == math.inf else int(most) * size,
        full_s=full_s,
        lost_s=every_s + copy_s if copy_s is not None and copy_s <= every_s else None,
        reasons=tuple(f"not counted, as time alone does not decide it: {rule}" for rule in unknown),
    )
    reasons = (*_reasons_of_rate(tier, rules, chain), *_reasons_of_room(tier, rules, chain))
    return replace(tier, reasons=(*reasons, *tier.reasons))


def _reasons_of_rate(tier: SteadyTier, rules: TierRules, chain: Chain) -> Iterator[str]:
    if tier.copy_s is None or tier.busy is None:
        yield "its write rate is unknown: it is assumed to keep up"
        return
    if tier.busy > 1:
        behind, rate = 3600 / tier.every_s - 3600 / tier.copy_s, chain.rates[tier.name]
        yield (
            f"falls behind by {format_count(behind)} checkpoints an hour: images come at "
            f"{format_rate(rate * tier.busy)}, and it takes {format_rate(rate)}: save less often, flush fewer to it "
            "(flush.every), or raise its bandwidth"
        )
        full = rules.when_full or chain.rules[0].when_full or WhenFull.WAIT
        if rules.in_order:
            yield f"once memory is full of copies that it is owed, when_full decides what saves do: {full}"
        else:
            yield f"takes the copies that it is owed by {rules.flush_order}: some may never arrive"
    if rules.within_s is not None and (tier.copy_s > rules.within_s or tier.busy > 1):
        yield f"copies arrive later than {format_duration(rules.within_s)} after their save (flush.within)"


def _reasons_of_room(tier: SteadyTier, rules: TierRules, chain: Chain) -> Iterator[str]:
    limit, size = chain.limit_of(rules), tier.copy_bytes
    grown = format_size(int(tier.grows_per_day * size))
    day = f"{format_count(tier.grows_per_day)} checkpoints a day for ever, {grown}"
    if limit is None:
        if tier.grows_per_day:
            yield f"keeps {day}, without a bound"
        return
    described, larger = f"its capacity of {format_size(limit)}", "raise capacity"
    if limit != rules.capacity_bytes:
        described = f"its file system, where {format_size(limit)} are free or hold this run,"
        larger = "free space there, or use a larger file system"
    if limit < size:
        yield f"cannot hold one checkpoint of {format_size(size)}: {described} is too small: {larger}"
    elif tier.full_s is not None:
        keeps = day if tier.grows_per_day else f"{tier.kept} checkpoints and the one that arrives"
        yield (
            f"full after {format_duration(tier.full_s)}: then the oldest is deleted for each new one. Its rules keep "
            f"{keeps}; {described} has room for {format_count(limit // size)}: {larger}, keep fewer (retain), or save "
            "less often there (flush.every)"
        )
