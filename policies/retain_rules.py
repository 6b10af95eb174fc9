"""The rules of retention: each says which of a tier's checkpoints it wants to keep, and why.

All are policies of kind ``retain``: (tier view, rules, now) -> {checkpoint: reason}. They are asked about live
checkpoints that are committed on the tier, so what was left behind or deleted never takes up a place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tierfall.core.units import format_period
from tierfall.core.values import CheckpointId, Direction
from tierfall.core.view import CheckpointView, TierView
from tierfall.policies.registry import register

Kept = dict[CheckpointId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """One checkpoint for so many training ``steps``, or for each period of so many seconds."""

    steps: int | None = None
    period_s: float | None = None

    def __str__(self) -> str:
        if self.period_s is not None:
            return f"every {format_period(self.period_s)}"
        return f"every {self.steps} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The ``count`` best by a metric."""

    metric: str
    mode: Direction = Direction.MIN
    count: int = 1

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric} ({self.mode})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What bears one of these tags; any tag where none is named."""

    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"tagged {' or '.join(self.names)}" if self.names else "tagged"


@register("retain", "last", rules=int, words=lambda count: f"last {count}", alike=True)
def keep_last(tier: TierView, count: int, now_s: float) -> Kept:
    """Keep the newest ``count``."""
    newest = reversed(tier.checkpoints[-count:])
    return {c.id: f"last {place} of {count}" for place, c in enumerate(newest, start=1)}


@register("retain", "every", rules=Every, words=str)
def keep_every(tier: TierView, every: Every, now_s: float) -> Kept:
    """Keep the first of each so many steps, or of each period.

    Steps are counted from 0: with 1000, the first checkpoint at or after 1000, at or after 2000 and so on, whether or
    not the cadence meets those steps; and step 0 itself. Periods are counted from 1970 in UTC, so a day is a day of
    the calendar. The first, not the newest: it is known for good when it arrives, and nothing newer displaces it.
    """
    if every.period_s is not None:
        return _first_of_periods(tier.checkpoints, every.period_s)
    assert every.steps is not None
    firsts: dict[int, CheckpointView] = {}
    for checkpoint in tier.checkpoints:
        firsts.setdefault(checkpoint.id.step // every.steps, checkpoint)
    kept = {}
    for number, checkpoint in firsts.items():
        begin = number * every.steps
        if checkpoint.id.step == begin:
            kept[checkpoint.id] = f"{every}: at {begin}"
        elif number > 0:
            kept[checkpoint.id] = f"{every}: the first after {begin}"
    return kept


def _first_of_periods(checkpoints: Iterable[CheckpointView], period_s: float) -> Kept:
    firsts: dict[int, CheckpointView] = {}
    for checkpoint in checkpoints:
        if checkpoint.wall_time_s is not None:
            firsts.setdefault(math.floor(checkpoint.wall_time_s / period_s), checkpoint)
    return {
        c.id: f"every {format_period(period_s)}: the first of its period" for c in firsts.values()
    }


@register("retain", "best", rules=Best, words=str)
def keep_best(tier: TierView, best: Best, now_s: float) -> Kept:
    """Keep the best by a metric; of equal ones the newer is better. What has no such metric, or nan, is none."""
    sign = 1 if best.mode is Direction.MIN else -1
    measured = [c for c in tier.checkpoints if not math.isnan(c.metrics.get(best.metric, math.nan))]
    newest_first = sorted(measured, key=lambda c: c.id, reverse=True)
    ranked = sorted(newest_first, key=lambda c: sign * c.metrics[best.metric])
    return {
        c.id: f"best {best.metric} {place} of {best.count}"
        for place, c in enumerate(ranked[: best.count], start=1)
    }


def _when_too_old(tier: TierView, seconds: float, now_s: float) -> float | None:
    ends = [c.wall_time_s + seconds for c in tier.checkpoints if c.wall_time_s is not None]
    return min((end for end in ends if end > now_s), default=None)


@register(
    "retain",
    "for",
    rules=float,
    due=_when_too_old,
    words=lambda seconds: f"for {format_period(seconds)}",
)
def keep_for(tier: TierView, seconds: float, now_s: float) -> Kept:
    """Keep what was saved less than ``seconds`` ago; what does not say when it was saved stays."""
    kept = {}
    for checkpoint in tier.checkpoints:
        if checkpoint.wall_time_s is None:
            kept[checkpoint.id] = "it does not say when it was saved"
        elif now_s < checkpoint.wall_time_s + seconds:
            kept[checkpoint.id] = f"younger than {format_period(seconds)}"
    return kept


@register("retain", "tags", rules=Tags, words=str)
def keep_tagged(tier: TierView, tags: Tags, now_s: float) -> Kept:
    """Keep what bears one of the tags."""
    kept = {}
    for checkpoint in tier.checkpoints:
        found = checkpoint.tags if not tags.names else checkpoint.tags & frozenset(tags.names)
        if found:
            kept[checkpoint.id] = f"tagged {', '.join(sorted(found))}"
    return kept
