"""Which promises of a run are broken, by the status of one of its processes."""

from __future__ import annotations

from collections.abc import Iterable

from tierfall.core.types.units import format_duration
from tierfall.telemetry.metrics import grown, to_key
from tierfall.telemetry.status import Status

DURABLE_INTERVALS = 2
DURABLE_LEAST_S = 10.0
"""A run that saves every second is not unhealthy because a commit takes a few."""
HANGS_AFTER_S = 15.0
"""The age of a status, which is written every 5 seconds, after which its process may hang."""


def durable_bound_s(every_s: float | None, flush_every: Iterable[int]) -> float | None:
    """Return the greatest healthy time, in seconds, without a commit on a stored tier: twice the interval at which some
    tier is to get a checkpoint. None where ``every_s``, the time between saves, is not known, or there is no such tier.
    """
    least = min(flush_every, default=None)
    if every_s is None or least is None:
        return None
    return max(DURABLE_INTERVALS * every_s * least, DURABLE_LEAST_S)


def broken_promises(status: Status, age_s: float) -> list[str]:
    """Return what is wrong, a sentence each; ``age_s`` is the age of the status in seconds."""
    reasons = []
    if status.failure is not None:
        reasons.append(f"nothing is flushed any more: {status.failure}")
    elif age_s > HANGS_AFTER_S:
        reasons.append(f"the status is {format_duration(round(age_s))} old: the process may hang")
    now = grown(status.metrics, age_s)
    reasons += [
        f"tier {tier.name} does not accept copies: {tier.failing}"
        for tier in status.tiers
        if tier.failing is not None
    ]
    for tier in status.tiers:
        behind, bound = (
            now.get(to_key(name, tier.name)) for name in ("behind_seconds", "behind_bound_seconds")
        )
        if behind is not None and bound is not None and behind > bound:
            reasons.append(
                f"tier {tier.name} is {format_duration(behind)} behind; flush.within is {format_duration(bound)}"
            )
        if count := now.get(to_key("degraded_copies", tier.name)):
            reasons.append(
                f"tier {tier.name} lacks {count:.0f} good copies: they are damaged, could not be read, or were set "
                "aside"
            )
    age, bound = (now.get(to_key(f"durable_{name}_seconds")) for name in ("age", "bound"))
    if age is not None and bound is not None and age > bound:
        reasons.append(
            f"no tier got a checkpoint for {format_duration(age)}; at most {format_duration(bound)} are expected"
        )
    return reasons
