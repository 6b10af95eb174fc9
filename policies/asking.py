"""Asking an order: the policy that a tier names, or the default, about checkpoints that lie there or are to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierfall.core.policy import Rule
from tierfall.core.values import CheckpointId
from tierfall.core.view import CheckpointView, TierRules, TierView, View

Order = Sequence[tuple[CheckpointId, str]]


def ask_order(
    rule: Rule | None,
    default: Callable[[TierView, None, float], Order],
    *,
    view: View,
    tier: TierRules,
    about: Sequence[CheckpointView],
) -> dict[CheckpointId, str]:
    """Return the reason of each checkpoint that the order speaks of, in its order; they are given oldest first."""
    asked = TierView(checkpoints=tuple(about), tier=tier, view=view)
    if rule is None:
        return dict(default(asked, None, view.wall_time_s))
    return dict(rule.policy.decide(asked, rule.rules, view.wall_time_s))
