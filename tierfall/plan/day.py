"""The forecast of a day: figures for each tier, with reasons. Pure: no I/O, no clock.

A simulated run (``simulate``) gives the figures. Its work is bounded: where it ends before the day does, the rest of
the day is extrapolated from the second half of what was simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tierfall.core.types.units import format_duration, format_rate, format_size
from tierfall.core.types.values import TierKind
from tierfall.core.types.view import TierRules
from tierfall.plan.simulate import (
    CounterSample,
    SimulatedChain,
    Simulation,
    TierCounters,
    Workload,
    copy_s_of,
    limit_of,
    ranks_on,
)

DAY_S = 86_400.0
WORK_MAX = 500_000
"""About 5,000 steps of the coordinator: two seconds of one core, or the day of a run that saves every 8 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """One tier after a day. Bytes are those that its capacity counts: of one rank in memory, of one node where the tier
    is not shared, of all ranks otherwise.

    A checkpoint of ``copy_bytes`` arrives every ``every_s`` and takes ``copy_s`` to write (None: the rate is unknown).
    The tier writes for the share ``busy`` of the time, and falls behind by ``behind_per_h`` checkpoints. ``kept`` and
    ``bytes`` are of the end of the day, ``kept_max`` and ``bytes_max`` the largest. ``full_s``: when a copy first found
    no room; ``waits``: nothing could be deleted for it. ``lag_s``: from save to commit, of the last copy. ``late_s``:
    when the tier first exceeded its ``flush.within``.
    """

    name: str
    copy_bytes: int
    every_s: float
    copy_s: float | None
    busy: float | None
    behind_per_h: float
    kept: int
    kept_max: int
    bytes: int
    bytes_max: int
    full_s: float | None
    waits: bool
    lag_s: float | None
    late_s: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DayForecast:
    """A run after a day: saves that succeeded, were skipped, and were superseded by later ones; how long training
    waited for room in memory; and each tier. ``played_s``: how much of ``horizon_s`` was simulated."""

    horizon_s: float
    played_s: float
    saves: int
    skipped: int
    superseded: int
    waited_s: float
    reasons: tuple[str, ...]
    tiers: tuple[TierForecast, ...]


def forecast_day(
    chain: SimulatedChain, load: Workload, *, horizon_s: float = DAY_S, work_max: int = WORK_MAX
) -> DayForecast:
    """Forecast the ``horizon_s`` seconds of a run after an empty start."""
    simulation = Simulation(chain, load, work_max=work_max)
    half, end = simulation.run_until(horizon_s)
    rest_s = horizon_s - end.at_s
    trend = rest_s / (end.at_s - half.at_s) if rest_s > 0 and end.at_s > half.at_s else 0.0

    def extrapolated(then: float, now: float) -> float:
        return now + (now - then) * trend

    saves = round(extrapolated(half.saves, end.saves))
    forecast = DayForecast(
        horizon_s=horizon_s,
        played_s=end.at_s,
        saves=saves,
        skipped=round(extrapolated(half.skipped, end.skipped)),
        superseded=round(extrapolated(half.superseded, end.superseded)),
        waited_s=extrapolated(half.waited_s, end.waited_s),
        tiers=tuple(
            _forecast_tier(
                rules,
                chain,
                load,
                simulation.counters[rules.name],
                half,
                end,
                trend,
                saves_max=saves,
            )
            for rules in chain.rules
        ),
        reasons=(),
    )
    if refused := tuple(_refusals(chain, load)):
        return _without_saves(forecast, refused)
    forecast = replace(forecast, reasons=tuple(_reasons_of_run(forecast)))
    full = {t.name for t in forecast.tiers[1:] if t.full_s is not None}
    if not full:
        return forecast
    endless = replace(chain, room={}, rules=tuple(_without_limit(r, full) for r in chain.rules))
    wanted = forecast_day(endless, load, horizon_s=horizon_s, work_max=work_max).tiers
    tiers = zip(forecast.tiers, wanted, chain.rules, strict=True)
    return replace(forecast, tiers=tuple(_with_limit(*tier, chain) for tier in tiers))


def _without_limit(rules: TierRules, full: Collection[str]) -> TierRules:
    """Return the rules of a tier without its capacity, if it is one of ``full``."""
    if rules.name not in full:
        return rules
    return replace(rules, capacity_bytes=None, evict_high=None, evict_low=None)


def _with_limit(
    tier: TierForecast, wanted: TierForecast, rules: TierRules, chain: SimulatedChain
) -> TierForecast:
    """Add to the reasons of a tier that its rules keep more than it can hold. ``wanted`` is its forecast without a
    limit."""
    limit, size = limit_of(rules, chain), tier.copy_bytes
    if rules.kind is TierKind.HOST or limit is None or not size <= limit < wanted.bytes_max:
        return tier
    reason = (
        f"without a limit it would hold at most {wanted.kept_max} checkpoints within the day, "
        f"{format_size(wanted.bytes_max)}; {_describe_limit(limit, rules)} has room for {limit // size}: "
        f"{_larger(limit, rules)}, keep fewer (retain), or save there less often (flush.every)"
    )
    return replace(tier, reasons=(*tier.reasons, reason))


def _describe_limit(limit: int, rules: TierRules) -> str:
    if limit == rules.capacity_bytes:
        return f"its capacity of {format_size(limit)}"
    return f"its file system, where {format_size(limit)} are free or hold this run,"


def _larger(limit: int, rules: TierRules) -> str:
    return (
        "raise capacity"
        if limit == rules.capacity_bytes
        else "free space there, or use a larger file system"
    )


def _without_saves(forecast: DayForecast, reasons: tuple[str, ...]) -> DayForecast:
    """Return the forecast of a run whose saves all raise an error."""
    tiers = (
        replace(
            tier,
            busy=None,
            behind_per_h=0.0,
            kept=0,
            kept_max=0,
            bytes=0,
            bytes_max=0,
            full_s=None,
            waits=False,
            lag_s=None,
            late_s=None,
            reasons=(),
        )
        for tier in forecast.tiers
    )
    return DayForecast(
        horizon_s=forecast.horizon_s,
        played_s=forecast.horizon_s,
        saves=0,
        skipped=0,
        superseded=0,
        waited_s=0.0,
        reasons=reasons,
        tiers=tuple(tiers),
    )


def _refusals(chain: SimulatedChain, load: Workload) -> Iterator[str]:
    """Name each tier that cannot hold one image: a save raises CapacityError then."""
    for rules in chain.rules:
        capacity = chain.host_bytes if rules.kind is TierKind.HOST else rules.capacity_bytes
        if capacity is not None and capacity < load.image_bytes:
            yield (
                f"every save raises CapacityError: one image takes {format_size(load.image_bytes)}, {rules.name} has a "
                f"capacity of {format_size(capacity)}"
            )


def _reasons_of_run(run: DayForecast) -> Iterator[str]:
    """Describe what full memory costs the run, and how much of the day is extrapolated."""
    requested = run.saves + run.skipped
    losses = []
    if run.skipped:
        losses.append(f"{run.skipped} of {requested} saves are skipped")
    if run.superseded:
        losses.append(f"{run.superseded} of {requested} are superseded by later ones")
    if run.waited_s >= 1.0:
        losses.append(f"training waits {format_duration(run.waited_s)} in all")
    if losses:
        host = run.tiers[0]
        slow = [tier.name for tier in run.tiers if tier.behind_per_h > 0 or tier.waits]
        held = f", held for {', '.join(slow)}" if slow else ""
        since = f" from {format_duration(host.full_s)} on" if host.full_s is not None else ""
        yield f"memory is full{since}{held}: {', '.join(losses)}"
    if run.played_s < run.horizon_s:
        yield (
            f"{format_duration(run.played_s)} were simulated; the rest is extrapolated from their second half"
        )


def _forecast_tier(
    rules: TierRules,
    chain: SimulatedChain,
    load: Workload,
    counters: TierCounters,
    half: CounterSample,
    end: CounterSample,
    trend: float,
    *,
    saves_max: int,
) -> TierForecast:
    """``trend``: how many times the second half of the simulated time still fits into the day."""
    name, size = rules.name, load.image_bytes * ranks_on(rules, chain, load)
    grown = max(0, end.kept[name] - half.kept[name])
    kept = min(saves_max, round(counters.kept + grown * trend))
    full_s = counters.full_s
    limit = limit_of(rules, chain)
    if rules.kind is not TierKind.HOST and limit is not None:
        kept_limit = limit // size
        if kept > kept_limit and full_s is None:
            per_s = grown / (end.at_s - half.at_s)
            full_s = end.at_s + (kept_limit - end.kept[name]) / per_s
        kept = min(kept, kept_limit)
    late_s = counters.late_s
    if late_s is None and rules.within_s is not None:
        grown_s = end.behind_s[name] - half.behind_s[name]
        if end.behind_s[name] + grown_s * trend > rules.within_s:
            left_s = (rules.within_s - end.behind_s[name]) * (end.at_s - half.at_s) / grown_s
            late_s = end.at_s + max(0.0, left_s)
    every_s = load.save_every_s * (rules.flush_every if rules.kind is not TierKind.HOST else 1)
    copy_s = None if rules.kind is TierKind.HOST else copy_s_of(rules, chain, load)
    behind = 0.0 if not copy_s else max(0.0, 3600 / every_s - 3600 / copy_s)
    tier = TierForecast(
        name=name,
        copy_bytes=size,
        every_s=every_s,
        copy_s=copy_s,
        busy=None if copy_s is None else copy_s / every_s,
        behind_per_h=behind,
        kept=kept,
        kept_max=max(counters.kept_max, kept),
        bytes=kept * size,
        bytes_max=max(counters.kept_max, kept) * size,
        full_s=full_s,
        waits=counters.refuses,
        lag_s=counters.lag_s,
        late_s=late_s,
        reasons=(),
    )
    return replace(tier, reasons=tuple(_reasons_of_tier(tier, rules, chain, load)))


def _short(count: float) -> str:
    return f"{count:.0f}" if count >= 100 else f"{count:.2g}" if count < 0.1 else f"{count:.1f}"


def _reasons_of_tier(
    tier: TierForecast, rules: TierRules, chain: SimulatedChain, load: Workload
) -> Iterator[str]:
    if rules.kind is TierKind.HOST:
        return
    limit = limit_of(rules, chain)
    if tier.copy_s is None:
        yield "its write rate is unknown: it is assumed to keep up"
    elif tier.behind_per_h:
        needed = load.image_bytes * load.ranks_per_node / tier.every_s
        yield (
            f"falls behind by {_short(tier.behind_per_h)} checkpoints an hour: its "
            f"{format_rate(chain.rates[rules.name])} against {format_rate(needed)} of images"
        )
    if tier.late_s is not None and rules.within_s is not None:
        yield (
            f"further behind than {format_duration(rules.within_s)} (flush.within) after "
            f"{format_duration(tier.late_s)}"
        )
    if limit is not None and limit < tier.copy_bytes:
        yield (
            f"cannot hold one checkpoint of {format_size(tier.copy_bytes)}: {_describe_limit(limit, rules)} is too "
            f"small: {_larger(limit, rules)}"
        )
    elif tier.full_s is not None:
        then = "the oldest is deleted for each new one"
        if tier.waits:
            then = "nothing may be deleted there, and newer ones do not arrive"
        yield f"full after {format_duration(tier.full_s)}: then {then}"
    elif rules.capacity_bytes is None and not rules.retain:
        yield "keeps all checkpoints, without a bound"
