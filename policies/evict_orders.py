"""The orders of eviction: what of a stored tier is given up first where its capacity is short.

All are policies of kind ``evict``: (tier view, rules, now) -> (checkpoint, reason) in the order in which they may go.
What must stay, and that what a rule of retention wants goes last, is not theirs to say.
"""

from __future__ import annotations

from tierfall.core.units import format_rate
from tierfall.core.values import CheckpointId, CopyState
from tierfall.core.view import CheckpointView, TierRules, TierView, View
from tierfall.policies.asking import Order
from tierfall.policies.registry import register


@register("evict", "cheapest", words=lambda rules: "the cheapest to lose first")
def cheapest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Give up first what was left behind, then what another tier holds that survives as much, what is quicker to read
    back from there before what is dearer; then what such a tier holds that nobody has verified; then what lies nowhere
    else so safe; the older first in each."""
    places = {rules.name: place for place, rules in enumerate(_quickest_first(tier.view))}

    def score(checkpoint: CheckpointView) -> tuple[bool, int, CheckpointId]:
        elsewhere = _elsewhere(checkpoint, tier)
        dear = places[elsewhere.name] if elsewhere else 2 * len(places)
        if elsewhere and not tier.view.is_safe(checkpoint, elsewhere.name):
            dear += len(places)
        return (checkpoint.live, dear, checkpoint.id)

    ordered = sorted(tier.checkpoints, key=score)
    return [(c.id, _said(c, _elsewhere(c, tier), tier.view)) for c in ordered]


@register("evict", "oldest", words=lambda rules: "the oldest first")
def oldest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Give up first what was left behind, then the oldest."""
    ordered = sorted(tier.checkpoints, key=lambda c: (c.live, c.id))
    return [(c.id, _said(c, None, tier.view)) for c in ordered]


def _quickest_first(view: View) -> list[TierRules]:
    """Sort the tiers by how fast they were seen to be read. Those that were not keep their places in the chain, and the
    others share out theirs: so each two that were measured stand right, and without any it is the chain."""
    rates = view.read_bytes_per_s
    measured = (tier for tier in view.tiers if tier.name in rates)
    in_turn = iter(sorted(measured, key=lambda tier: rates[tier.name], reverse=True))
    return [next(in_turn) if tier.name in rates else tier for tier in view.tiers]


def _elsewhere(checkpoint: CheckpointView, tier: TierView) -> TierRules | None:
    """Return the other tier that a restore would take it from, of those that hold it as safely as this one."""
    return min(
        (
            other
            for other in tier.view.tiers
            if other.name != tier.tier.name
            and checkpoint.state(other.name) is CopyState.COMMITTED
            and other.survives.covers(tier.tier.survives)
        ),
        key=lambda other: not tier.view.is_safe(checkpoint, other.name),
        default=None,
    )


def _said(checkpoint: CheckpointView, elsewhere: TierRules | None, view: View) -> str:
    if not checkpoint.live:
        return "it is of an abandoned line" if checkpoint.abandoned else "deleted by a person"
    if elsewhere is not None:
        rate = view.read_bytes_per_s.get(elsewhere.name)
        read = "" if rate is None else f", read at {format_rate(rate)}"
        return f"{elsewhere.name} holds it as safely{read}"
    return "it is the oldest that may go"
