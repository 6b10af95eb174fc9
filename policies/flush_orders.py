"""The orders of a flush: which of the copies that a tier is owed goes there first.

All are policies of kind ``flush``: (tier view, rules, now) -> (checkpoint, reason) in the order in which they go. What
is given up on the way, and that a copy which was begun is finished first, is not theirs to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierfall.core.view import CheckpointView, TierView
from tierfall.policies.asking import Order
from tierfall.policies.registry import register

IN_ORDER = "in_order"
"""The default, and the only order under which a newer copy on a tier says that older ones were dealt with."""


@register("flush", IN_ORDER)
def in_order(tier: TierView, rules: None, now_s: float) -> Order:
    """Bring them as they were saved."""
    return _each(tier.checkpoints, first="the oldest that waits", before="older")


@register("flush", "newest_first")
def newest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Bring the newest, and older ones after it."""
    return _each(tier.checkpoints[::-1], first="the newest that waits", before="newer")


def _each(checkpoints: Sequence[CheckpointView], *, first: str, before: str) -> Order:
    reasons = (
        f"after {place} {before} {'one' if place == 1 else 'ones'}" if place else first
        for place in range(len(checkpoints))
    )
    return [(c.id, reason) for c, reason in zip(checkpoints, reasons, strict=True)]
