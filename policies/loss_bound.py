"""The loss bound: what would be lost if this process, this node, or this site died now, and how soon training could go
on.

Pure: (view, step) -> one bound for each loss class. A copy in memory counts for the loss of a process alone.
"""

from __future__ import annotations

from tierfall.core.loss import LossBound
from tierfall.core.values import LOSS_CLASSES, LossClass
from tierfall.core.view import CheckpointView, TierRules, View


def loss_bounds(
    view: View,
    *,
    step: int | None = None,
    step_s: float | None = None,
) -> dict[LossClass, LossBound]:
    """Say for each loss class which step survives, what is lost, and from which tier it would be restored how soon.

    ``step`` is the one that training is at (None: not known), ``step_s`` how many seconds one takes.
    """
    return {lost: _bound(view, lost, step, step_s) for lost in LOSS_CLASSES}


def _bound(view: View, lost: LossClass, step: int | None, step_s: float | None) -> LossBound:
    found = _newest_surviving(view, lost)
    if found is None:
        return LossBound(
            survives=None, tier=None, steps_lost=None, seconds_lost=None, restore_s=None
        )
    checkpoint, tier = found
    steps_lost = None if step is None else max(0, step - checkpoint.id.step)
    rate = view.read_bytes_per_s.get(tier.name)
    image_bytes = max(copy.bytes for copy in checkpoint.copies.values())
    return LossBound(
        survives=checkpoint.id,
        tier=tier.name,
        steps_lost=steps_lost,
        seconds_lost=None if steps_lost is None or step_s is None else steps_lost * step_s,
        restore_s=image_bytes / rate if rate else None,
    )


def _newest_surviving(view: View, lost: LossClass) -> tuple[CheckpointView, TierRules] | None:
    """Find the newest live checkpoint that survives a loss, and the fastest tier that would still have it."""
    tiers = [tier for tier in view.tiers if tier.survives.covers(lost)]
    for checkpoint in sorted(view.checkpoints, key=lambda c: c.id, reverse=True):
        for tier in tiers:
            if checkpoint.live and checkpoint.readable_on(tier.name):
                return checkpoint, tier
    return None
