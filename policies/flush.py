"""Flush: which tiers are owed a copy of a checkpoint, and in which order a tier takes what it is owed.

Pure. A tier gets the checkpoints whose ordinal its ``flush.every`` divides; in rising order, or the newest first. What
it has moved past is not sent again, nor is what its retention would drop as soon as it came.
"""

from __future__ import annotations

from dataclasses import replace

from tierfall.core.values import CopyState, FlushOrder, TierKind
from tierfall.core.view import CheckpointView, CopyView, Decision, TierRules, Verdict, View
from tierfall.policies.retention import plan_retention

_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST)


def tiers_owed(tiers: tuple[TierRules, ...], ordinal: int) -> tuple[str, ...]:
    """Name the tiers that a new checkpoint of this ordinal is flushed to, fastest first."""
    return tuple(t.name for t in tiers if t.kind not in _IN_MEMORY and ordinal % t.flush_every == 0)


def still_owed(view: View, checkpoint: CheckpointView) -> tuple[str, ...]:
    """Name the tiers that a checkpoint found at a start is still owed to.

    Not where it is; nor, where copies arrive in order, where a newer checkpoint of the line was committed: that tier
    had it once, or gave it up. Where the newest comes first that says nothing, and what retention would keep there is
    still owed. Nor where so many newer ones are to come that retention would drop it at once.
    """
    if not checkpoint.live:
        return ()
    return tuple(
        name
        for name in tiers_owed(view.tiers, checkpoint.ordinal)
        if not checkpoint.readable_on(name)
        and _why_not_any_more(view, checkpoint, view.tier(name)) is None
        and (checkpoint.pinned or not _is_outlived(view, view.tier(name), checkpoint))
    )


def plan_flush(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every live checkpoint that ``tier_name`` is owed and that is not on its way there, in the order in
    which the tier takes them; DROP: its copy is given up."""
    tier = view.tier(tier_name)
    waiting = [
        c
        for c in view.checkpoints
        if c.live and tier_name in c.owed and c.state(tier_name) is CopyState.ABSENT
    ]
    newest_first = tier.flush_order is FlushOrder.NEWEST_FIRST
    decisions: list[Decision] = []
    for checkpoint in sorted(waiting, key=lambda c: c.id, reverse=newest_first):
        reason = _why_not_any_more(view, checkpoint, tier) if newest_first else None
        verdict = Verdict.KEEP if reason is None else Verdict.DROP
        before = sum(d.verdict is Verdict.KEEP for d in decisions)
        decisions.append(
            Decision(
                checkpoint=checkpoint.id,
                tier=tier_name,
                verdict=verdict,
                reason=reason or _turn(before, newest_first=newest_first),
                bytes=max((copy.bytes for copy in checkpoint.copies.values()), default=0),
            )
        )
    return tuple(decisions)


def _turn(before: int, *, newest_first: bool) -> str:
    which = "newer" if newest_first else "older"
    if before == 0:
        return f"the {'newest' if newest_first else 'oldest'} that waits"
    return f"after {before} {which} {'one' if before == 1 else 'ones'}"


def _why_not_any_more(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    """Say why a tier that has a newer checkpoint is not to get this one any more; None where it has none, or where it
    takes the newest first and its retention would keep this one."""
    if not any(c.live and c.id > checkpoint.id for c in view.on(tier.name)):
        return None
    if tier.flush_order is FlushOrder.IN_ORDER:
        return "it has a newer one, and copies arrive in order"
    there = CopyView(state=CopyState.COMMITTED, bytes=0)
    arrived = replace(
        checkpoint,
        copies={**checkpoint.copies, tier.name: there},
        owed=checkpoint.owed - {tier.name},
    )
    as_if = replace(
        view,
        checkpoints=tuple(arrived if c.id == checkpoint.id else c for c in view.checkpoints),
    )
    told = next(d for d in plan_retention(as_if, tier.name) if d.checkpoint == checkpoint.id)
    if told.verdict is Verdict.KEEP:
        return None
    return f"newer ones came first, and retention would drop it at once ({told.reason})"


def _is_outlived(view: View, tier: TierRules, checkpoint: CheckpointView) -> bool:
    """Say whether newer checkpoints than this one fill what the tier retains."""
    if tier.retain_last is None:
        return False
    newer = [
        c
        for c in view.checkpoints
        if c.live
        and c.id > checkpoint.id
        and c.ordinal % tier.flush_every == 0
        and any(c.readable_on(name) for name in c.copies)
    ]
    return len(newer) >= tier.retain_last
