"""Throttling: what share of a tier's rate a flush may use, by its effect on the training's steps. Pure.

Steps during a flush are compared with steps without one. If they are longer, by more than steps vary anyway, the share
is halved; once they are not, it grows by a quarter. In between it is unchanged, so that the rate does not oscillate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.types.units import format_share

STEPS_MIN = 8
"""The least number of steps of each kind for a decision."""
RISE = 0.05
FALL = 0.02
SLOWER = 0.5
FASTER = 1.25
LEAST = 0.1
"""The smallest share."""
SPARE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldDecision:
    """The share of a tier's rate that a flush may use (1: all), and why."""

    share: float
    reason: str


def plan_yield(
    *, idle_s: Sequence[float], busy_s: Sequence[float], share: float, least: float
) -> YieldDecision:
    """Choose the share for the next steps. ``idle_s`` are the durations of steps without a flush, ``busy_s`` of those
    during one with ``share``; the result is ``least`` or more, whatever its effect."""
    least = min(1.0, max(LEAST, least))
    if min(len(idle_s), len(busy_s)) < STEPS_MIN:
        return YieldDecision(
            share=share, reason=f"too few steps are known, of {STEPS_MIN} of each kind"
        )
    usual_s = statistics.median(idle_s)
    rise = statistics.median(busy_s) / usual_s - 1.0
    variation = statistics.median(abs(each - usual_s) for each in idle_s) / usual_s
    if rise > max(RISE, 2 * variation):
        slower = max(least, share * SLOWER)
        if slower >= share:
            reason = f"steps take {format_share(rise)} longer, and {format_share(least)} is the smallest share"
            return YieldDecision(share=max(share, least), reason=reason)
        return YieldDecision(
            share=slower, reason=f"steps take {format_share(rise)} longer beside it"
        )
    if rise < FALL and share < 1.0:
        faster = min(1.0, max(least, share * FASTER))
        return YieldDecision(share=faster, reason="steps take no longer beside it")
    return YieldDecision(share=max(share, least), reason="steps take about as long beside it")


def least_share(
    *,
    image_bytes: int,
    every_s: float,
    within_s: float | None,
    bytes_per_s: float,
) -> float:
    """Return the share of its rate that a tier needs to keep up with the saves, and to meet ``flush.within``; a tenth
    more, as rates vary. ``every_s``: seconds between its checkpoints."""
    times = [seconds for seconds in (every_s, within_s) if seconds]
    if not times or bytes_per_s <= 0:
        return LEAST
    return min(1.0, max(LEAST, SPARE * image_bytes / min(times) / bytes_per_s))
