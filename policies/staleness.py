"""Staleness: which checkpoints a tier must get within a time that was promised, and when that was not kept. Pure."""

from __future__ import annotations

from tierfall.core.units import format_duration
from tierfall.core.view import CheckpointView, TierRules, View


def owed_in_time(view: View, checkpoint: CheckpointView) -> str | None:
    """Say which tier is owed this checkpoint under a bound on its staleness; None where none is."""
    for tier in view.tiers:
        if tier.within_s is not None and tier.name in checkpoint.owed:
            return f"{tier.name} is owed it within {format_duration(tier.within_s)}"
    return None


def lateness(tier: TierRules, behind_s: float) -> str | None:
    """Say that a tier is further behind than it may be; ``behind_s`` is how long ago the oldest checkpoint was saved
    that is newer than all that the tier has. None where it is not, or there is no bound."""
    if tier.within_s is None or behind_s <= tier.within_s:
        return None
    return (
        f"{tier.name} is {format_duration(behind_s)} behind, and was to be no further than "
        f"{format_duration(tier.within_s)} (flush.within)"
    )
