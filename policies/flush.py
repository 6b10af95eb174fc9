"""Flush: which tiers are owed a copy of a checkpoint, and in which order a tier takes what it is owed.

Pure. A tier gets the checkpoints whose ordinal its ``flush.every`` divides, and the one that a training ended with; in
rising order, or the newest first. What it has moved past is not sent again, nor is what its retention would drop as
soon as it came.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tierfall.core.values import CheckpointId, CopyState, FlushOrder, TierKind
from tierfall.core.view import CheckpointView, CopyView, Decision, TierRules, Verdict, View
from tierfall.policies.guard import beginning_of_the_line, newest_of
from tierfall.policies.retention import decide_on_one, wanted_of

_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST)


def tiers_owed(
    tiers: tuple[TierRules, ...], ordinal: int, *, at_end: bool = False
) -> tuple[str, ...]:
    """Name the tiers that a new checkpoint of this ordinal is flushed to, fastest first; ``at_end``: all of them."""
    stored = (t for t in tiers if t.kind not in _IN_MEMORY)
    return tuple(t.name for t in stored if at_end or ordinal % t.flush_every == 0)


def still_owed(view: View, checkpoint: CheckpointView) -> tuple[str, ...]:
    """Name the tiers that a checkpoint found at a start is still owed to.

    Not where it is; nor, where copies arrive in order, where a newer checkpoint of the line was committed: that tier
    had it once, or gave it up. Where the newest comes first that says nothing, and what retention would keep there is
    still owed. Nor where it would be dropped at once beside those that are to come.
    """
    if not checkpoint.live:
        return ()
    return tuple(
        name
        for name in tiers_owed(view.tiers, checkpoint.ordinal, at_end=checkpoint.at_end)
        if not checkpoint.readable_on(name)
        and not _has_moved_past(view, checkpoint, view.tier(name))
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
    held = view.on(tier_name) if newest_first else ()
    newest = _newest_live(held)
    before = 0
    decisions: list[Decision] = []
    for checkpoint in sorted(waiting, key=lambda c: c.id, reverse=newest_first):
        is_late = newest is not None and checkpoint.id < newest
        reason = _why_not_any_more(view, checkpoint, tier, held) if is_late else None
        verdict = Verdict.KEEP if reason is None else Verdict.DROP
        decisions.append(
            Decision(
                checkpoint=checkpoint.id,
                tier=tier_name,
                verdict=verdict,
                reason=reason or _turn(before, newest_first=newest_first),
                bytes=max((copy.bytes for copy in checkpoint.copies.values()), default=0),
            )
        )
        before += verdict is Verdict.KEEP
    return tuple(decisions)


def _newest_live(held: Iterable[CheckpointView]) -> CheckpointId | None:
    return max((c.id for c in held if c.live), default=None)


def _turn(before: int, *, newest_first: bool) -> str:
    which = "newer" if newest_first else "older"
    if before == 0:
        return f"the {'newest' if newest_first else 'oldest'} that waits"
    return f"after {before} {which} {'one' if before == 1 else 'ones'}"


def _has_moved_past(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    """Say whether a tier had it once, or gave it up, by what lies there. Where ranks might come to different answers it
    counts as still to come."""
    held = view.on(tier.name)
    newest = _newest_live(held)
    if newest is None or newest < checkpoint.id:
        return False
    if tier.flush_order is FlushOrder.IN_ORDER:
        return True
    return (
        _is_told_alike(view, tier) and _why_not_any_more(view, checkpoint, tier, held) is not None
    )


def _is_told_alike(view: View, tier: TierRules) -> bool:
    """Say whether all ranks come to the same answer about what the tier retains: of several, only by rules that go by
    steps and attempts alone."""
    return not view.many_ranks or all(rule.policy.alike for rule in tier.retain)


def _why_not_any_more(
    view: View, checkpoint: CheckpointView, tier: TierRules, held: tuple[CheckpointView, ...]
) -> str | None:
    """Say why a tier that takes the newest first, and holds ``held`` with a newer one, is not to get this one any more;
    None where its retention would keep it."""
    if not tier.retain:
        return None
    arrived = replace(_as_if_there(checkpoint, tier), owed=checkpoint.owed - {tier.name})
    told = decide_on_one(view, arrived, tier, beside=held)
    if told.verdict is Verdict.KEEP:
        return None
    return f"newer ones came first, and retention would drop it at once ({told.reason})"


def _is_outlived(view: View, tier: TierRules, checkpoint: CheckpointView) -> bool:
    """Say whether the tier would drop it at once: neither a rule nor the guard would keep it beside what lies there and
    what is to come.

    Ranks must not come to different answers, or some would wait for the others' parts for ever: where there are
    several, a rule that goes by more than steps and attempts counts as one that wants it.
    """
    if not tier.retain or not _is_told_alike(view, tier):
        return False
    newest = _newest_live(view.on(tier.name))
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
    in_order = tier.flush_order is FlushOrder.IN_ORDER
    return (
        checkpoint.live
        and (checkpoint.at_end or checkpoint.ordinal % tier.flush_every == 0)
        and any(checkpoint.readable_on(name) for name in checkpoint.copies)
        and (newest is None or not in_order or checkpoint.id > newest)
    )


def _as_if_there(checkpoint: CheckpointView, tier: TierRules) -> CheckpointView:
    copy = CopyView(state=CopyState.COMMITTED, bytes=0)
    return replace(checkpoint, copies={**checkpoint.copies, tier.name: copy})
