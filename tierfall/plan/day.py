"""A day: what a configuration will do over a day. Pure: (rules, rates, image, interval) -> figures with reasons.

The day is played on the policies themselves (``simulate``). The work is bounded: of a day that is longer than what it
buys, the rest goes on as the second half of what was played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierfall.core.types.units import format_duration, format_rate, format_size
from tierfall.core.types.values import TierKind
from tierfall.core.types.view import TierRules
from tierfall.plan.simulate import (
    CounterSample,
    SimulatedChain,
    Simulation,
    Workload,
    copy_s_of,
    keeps_all,
)

DAY_S = 86_400.0
WORK_MAX = 1_000_000
"""How many looks of a policy at a checkpoint are played: some seconds of one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """What becomes of one tier. Bytes are those that its capacity counts: one rank's in memory, one node's where the
    tier is not shared, else all.

    A checkpoint of ``copy_bytes`` comes every ``every_s``, and takes ``copy_s`` to write (None: its rate is not known),
    so that it writes for the share ``busy`` of the time, and falls behind by ``behind_per_h`` checkpoints. ``kept`` and
    ``bytes`` are there at the end, ``kept_max`` and ``bytes_max`` at most. ``full_s``: when it had no room for a copy
    first; ``waits``: nothing may go then, and it takes no more. ``lag_s``: from save to commit, of the last copy.
    ``late_s``: when it was first further behind than its ``within``.
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
    """What becomes of a run: saves that were taken, skipped and given up for later ones, how long training waited for
    room in memory, and each tier. ``played_s``: what was played of ``horizon_s``; the rest follows its trend."""

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
    """Say what a run does in ``horizon_s`` seconds from an empty start."""
    play = Simulation(chain, load, work_max=work_max)
    half, end = play.until(horizon_s)
    rest_s = horizon_s - end.at_s
    trend = rest_s / (end.at_s - half.at_s) if rest_s > 0 and end.at_s > half.at_s else 0.0

    def ends(then: float, now: float) -> float:
        return now + (now - then) * trend

    saves = round(ends(half.saves, end.saves))
    course = (half, end, trend)
    made = DayForecast(
        horizon_s=horizon_s,
        played_s=end.at_s,
        saves=saves,
        skipped=round(ends(half.skipped, end.skipped)),
        superseded=round(ends(half.superseded, end.superseded)),
        waited_s=ends(half.waited_s, end.waited_s),
        tiers=tuple(
            _tier(rules, chain, load, play, course, saves_max=saves) for rules in chain.rules
        ),
        reasons=(),
    )
    return replace(made, reasons=tuple(_reasons(made)))


def _reasons(made: DayForecast) -> Iterator[str]:
    """Say what a run loses to a full memory, and what is not exact here."""
    asked = made.saves + made.skipped
    lost = [f"{made.skipped} of {asked} saves are skipped"] * bool(made.skipped)
    lost += [f"{made.superseded} of {asked} are given up for later ones"] * bool(made.superseded)
    lost += [f"training waits {format_duration(made.waited_s)} in all"] * (made.waited_s >= 1.0)
    if lost:
        host = made.tiers[0]
        slow = [tier.name for tier in made.tiers if tier.behind_per_h > 0 or tier.waits]
        held = f", held for {', '.join(slow)}" if slow else ""
        since = f" from {format_duration(host.full_s)} on" if host.full_s is not None else ""
        yield f"memory is full{since}{held}: {', '.join(lost)}"
    if made.played_s < made.horizon_s:
        yield (
            f"{format_duration(made.played_s)} were played, the rest follows the trend of their second half"
        )


def _tier(
    rules: TierRules,
    chain: SimulatedChain,
    load: Workload,
    play: Simulation,
    course: tuple[CounterSample, CounterSample, float],
    *,
    saves_max: int,
) -> TierForecast:
    half, end, trend = course
    name, size = rules.name, play.copy_bytes[rules.name]
    counted = play.counted[name]
    grown = max(0, end.kept[name] - half.kept[name])
    kept = min(saves_max, round(play.kept(name) + grown * trend))
    full_s = counted.full_s
    if rules.kind is not TierKind.HOST and rules.capacity_bytes is not None:
        most = rules.capacity_bytes // size
        if kept > most and full_s is None:
            per_s = grown / (end.at_s - half.at_s)
            full_s = end.at_s + (most - end.kept[name]) / per_s
        kept = min(kept, most)
    late_s = counted.late_s
    if late_s is None and rules.within_s is not None:
        grown_s = end.behind_s[name] - half.behind_s[name]
        if end.behind_s[name] + grown_s * trend > rules.within_s:
            still_s = (rules.within_s - end.behind_s[name]) * (end.at_s - half.at_s) / grown_s
            late_s = end.at_s + max(0.0, still_s)
    every_s = load.save_every_s * (rules.flush_every if rules.kind is not TierKind.HOST else 1)
    copy_s = None if rules.kind is TierKind.HOST else copy_s_of(rules, chain, load)
    behind = 0.0 if not copy_s else max(0.0, 3600 / every_s - 3600 / copy_s)
    made = TierForecast(
        name=name,
        copy_bytes=size,
        every_s=every_s,
        copy_s=copy_s,
        busy=None if copy_s is None else copy_s / every_s,
        behind_per_h=behind,
        kept=kept,
        kept_max=max(counted.kept_max, kept),
        bytes=kept * size,
        bytes_max=max(counted.kept_max, kept) * size,
        full_s=full_s,
        waits=counted.waits,
        lag_s=counted.lag_s,
        late_s=late_s,
        reasons=(),
    )
    return _with_reasons(made, rules, chain, load)


def _short(count: float) -> str:
    return f"{count:.0f}" if count >= 100 else f"{count:.2g}" if count < 0.1 else f"{count:.1f}"


def _with_reasons(
    tier: TierForecast, rules: TierRules, chain: SimulatedChain, load: Workload
) -> TierForecast:
    found = []
    if rules.kind is not TierKind.HOST:
        capacity = rules.capacity_bytes
        if tier.copy_s is None:
            found.append("how fast it writes is not known: it is taken to keep up")
        elif tier.behind_per_h:
            comes = load.image_bytes * load.ranks_per_node / tier.every_s
            found.append(
                f"falls behind by {_short(tier.behind_per_h)} checkpoints an hour: its "
                f"{format_rate(chain.rates[rules.name])} against {format_rate(comes)} of images"
            )
        if tier.late_s is not None and rules.within_s is not None:
            found.append(
                f"further behind than {format_duration(rules.within_s)} (flush.within) after "
                f"{format_duration(tier.late_s)}"
            )
        if capacity is not None and capacity < tier.copy_bytes:
            found.append(
                f"cannot hold one checkpoint: {format_size(tier.copy_bytes)}, its capacity is "
                f"{format_size(capacity)}"
            )
        elif tier.full_s is not None:
            then = "the oldest makes room"
            if tier.waits:
                then = "nothing may go there, and newer ones do not arrive"
            found.append(f"full after {format_duration(tier.full_s)}: then {then}")
        elif keeps_all(rules):
            found.append("keeps all it gets, without a bound")
    return replace(tier, reasons=tuple(found))
