"""Flush: which tiers are owed a copy of a checkpoint.

Pure. A tier gets the checkpoints whose ordinal its ``flush.every`` divides, and the one that a training ended with, in
rising order; what it has moved past is not sent again.
"""

from __future__ import annotations

from tierfall.core.values import TierKind
from tierfall.core.view import CheckpointView, TierRules, View

_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST)


def tiers_owed(
    tiers: tuple[TierRules, ...], ordinal: int, *, at_end: bool = False
) -> tuple[str, ...]:
    """Name the tiers that a new checkpoint of this ordinal is flushed to, fastest first; ``at_end``: all of them."""
    stored = (t for t in tiers if t.kind not in _IN_MEMORY)
    return tuple(t.name for t in stored if at_end or ordinal % t.flush_every == 0)


def still_owed(view: View, checkpoint: CheckpointView) -> tuple[str, ...]:
    """Name the tiers that a checkpoint found at a start is still owed to.

    Not where it is, nor where a newer checkpoint of the line was committed: copies arrive in order, so that tier had
    it once, or gave it up. Nor where so many newer ones are to come that retention would drop it at once.
    """
    if not checkpoint.live:
        return ()
    return tuple(
        name
        for name in tiers_owed(view.tiers, checkpoint.ordinal, at_end=checkpoint.at_end)
        if not checkpoint.readable_on(name)
        and not any(c.live and c.id > checkpoint.id for c in view.on(name))
        and (checkpoint.pinned or not _is_outlived(view, view.tier(name), checkpoint))
    )


def _is_outlived(view: View, tier: TierRules, checkpoint: CheckpointView) -> bool:
    """Say whether newer checkpoints than this one fill what the tier retains."""
    if tier.retain_last is None:
        return False
    newer = [
        c
        for c in view.checkpoints
        if c.live
        and c.id > checkpoint.id
        and (c.at_end or c.ordinal % tier.flush_every == 0)
        and any(c.readable_on(name) for name in c.copies)
    ]
    return len(newer) >= tier.retain_last
