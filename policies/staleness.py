"""Staleness: which checkpoints a tier must get within a time that was promised. Pure."""

from __future__ import annotations

from tierfall.core.units import format_duration
from tierfall.core.view import CheckpointView, View


def owed_in_time(view: View, checkpoint: CheckpointView) -> str | None:
    """Say which tier is owed this checkpoint under a bound on its staleness; None where none is."""
    for tier in view.tiers:
        if tier.within_s is not None and tier.name in checkpoint.owed:
            return f"{tier.name} is owed it within {format_duration(tier.within_s)}"
    return None
