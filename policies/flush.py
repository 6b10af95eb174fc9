"""Flush: which tiers are owed a copy of a checkpoint.

Pure. A tier gets the checkpoints whose ordinal its ``flush.every`` divides, and the one that a training ended with, in
rising order; what it has moved past is not sent again.
"""

from __future__ import annotations

from dataclasses import replace

from tierfall.core.values import CheckpointId, CopyState, TierKind
from tierfall.core.view import CheckpointView, CopyView, TierRules, View
from tierfall.policies.guard import beginning_of_the_line, newest_of
from tierfall.policies.retention import wanted_of

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
    it once, or gave it up. Nor where it would be dropped at once beside those that are to come.
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
    """Say whether the tier would drop it at once: neither a rule nor the guard would keep it beside what lies there and
    what is to come.

    Ranks must not come to different answers, or some would wait for the others' parts for ever: where there are
    several, a rule that goes by more than steps and attempts counts as one that wants it.
    """
    if not tier.retain:
        return False
    if view.many_ranks and not all(rule.policy.alike for rule in tier.retain):
        return False
    newest = max((c.id for c in view.on(tier.name) if c.live), default=None)
    expected = {
        c.id: _as_if_there(c, tier)
        for c in view.checkpoints
        if c.id == checkpoint.id or c.readable_on(tier.name) or _is_to_come(c, tier, newest)
    }
    if checkpoint.id in wanted_of(view, tier, expected.values()):
        return False
    then = replace(view, checkpoints=tuple(expected.get(c.id, c) for c in view.checkpoints))
    kept = newest_of(then, expected[checkpoint.id], tier, frozenset())
    return kept is None and beginning_of_the_line(then, checkpoint) is None


def _is_to_come(checkpoint: CheckpointView, tier: TierRules, newest: CheckpointId | None) -> bool:
    """Say whether the tier, which holds none newer than ``newest``, is to get it."""
    return (
        checkpoint.live
        and (checkpoint.at_end or checkpoint.ordinal % tier.flush_every == 0)
        and any(checkpoint.readable_on(name) for name in checkpoint.copies)
        and (newest is None or checkpoint.id > newest)
    )


def _as_if_there(checkpoint: CheckpointView, tier: TierRules) -> CheckpointView:
    copy = CopyView(state=CopyState.COMMITTED, bytes=0)
    return replace(checkpoint, copies={**checkpoint.copies, tier.name: copy})
