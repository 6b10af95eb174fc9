"""Flush: which tiers are owed a copy of a checkpoint, and in which order a tier takes what it is owed.

Pure. A tier gets the checkpoints whose ordinal its ``flush.every`` divides, and the one that a training ended with, in
the order of ``flush.order`` (``in_order``, ``newest_first``). What the tier has moved past is not sent again, nor what
its retention would drop at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId, CopyState, TierKind
from tierfall.core.types.view import (
    CheckpointView,
    CopyView,
    Decision,
    TierRules,
    TierView,
    Verdict,
    View,
)
from tierfall.policies.protection import beginning_of_the_line, newest_of
from tierfall.policies.registry import Order, ask_order, register
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
    had it once, or gave it up, unless its records say that it is still to get it. In any other order a newer one says
    nothing, and what retention would keep there is still owed.
    Nor where it would be dropped at once beside those that are to come.
    """
    if not checkpoint.live:
        return ()
    return tuple(
        name
        for name in tiers_owed(view.tiers, checkpoint.ordinal, at_end=checkpoint.at_end)
        if not checkpoint.readable_on(name)
        and (name in checkpoint.overtaken or not _has_moved_past(view, checkpoint, view.tier(name)))
        and (checkpoint.pinned or not _is_outlived(view, view.tier(name), checkpoint))
    )


def needs_repair(view: View, checkpoint: CheckpointView, tier_name: str) -> bool:
    """Say whether the damaged copy of a checkpoint on a tier is written anew: it can be read from another one, and what
    the tier retains would keep a whole copy there."""
    if not checkpoint.live:
        return False
    if not any(checkpoint.readable_on(t.name) for t in view.tiers if t.name != tier_name):
        return False
    tier = view.tier(tier_name)
    reason = _why_not_any_more(view, checkpoint, tier, view.on(tier_name))
    return checkpoint.pinned or reason is None


def plan_flush(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every live checkpoint that ``tier_name`` is owed and that is not on its way there: first what is given
    up, the newest first, then the others in the order in which the tier takes them."""
    tier = view.tier(tier_name)
    waiting = sorted(
        (
            c
            for c in view.checkpoints
            if c.live and tier_name in c.owed and c.state(tier_name) is CopyState.ABSENT
        ),
        key=lambda c: c.id,
    )
    held = () if tier.in_order else view.on(tier_name)
    newest = _newest_live(held)
    given_up, left = [], []
    for checkpoint in waiting:
        is_late = newest is not None and checkpoint.id < newest
        reason = _why_not_any_more(view, checkpoint, tier, held) if is_late else None
        if reason is None:
            left.append(checkpoint)
        else:
            given_up.append(_decided(checkpoint, tier, reason, Verdict.DROP))
    goes = (_decided(c, tier, reason, Verdict.KEEP) for c, reason in _in_turn(view, tier, left))
    return (*reversed(given_up), *goes)


def _in_turn(
    view: View, tier: TierRules, waiting: Sequence[CheckpointView]
) -> Iterator[tuple[CheckpointView, str]]:
    """Give each as the order of the tier says, and why it comes where it does; what it says nothing of comes after, the
    oldest first."""
    reasons = ask_order(tier.flush_order, in_order, view=view, tier=tier, about=waiting)
    places = {id: place for place, id in enumerate(reasons)}
    for checkpoint in sorted(waiting, key=lambda c: (places.get(c.id, len(places)), c.id)):
        yield (
            checkpoint,
            reasons.get(checkpoint.id, "its turn comes after what the order speaks of"),
        )


def _decided(
    checkpoint: CheckpointView, tier: TierRules, reason: str, verdict: Verdict
) -> Decision:
    return Decision(
        checkpoint=checkpoint.id,
        tier=tier.name,
        verdict=verdict,
        reason=reason,
        bytes=max((copy.bytes for copy in checkpoint.copies.values()), default=0),
    )


def _newest_live(held: Iterable[CheckpointView]) -> CheckpointId | None:
    return max((c.id for c in held if c.live), default=None)


def _has_moved_past(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    """Say whether a tier had it once, or gave it up, by what lies there. Where ranks might come to different answers it
    counts as still to come."""
    held = view.on(tier.name)
    newest = _newest_live(held)
    if newest is None or newest < checkpoint.id:
        return False
    if tier.in_order:
        return True
    return (
        _is_same_on_all_ranks(view, tier)
        and _why_not_any_more(view, checkpoint, tier, held) is not None
    )


def _is_same_on_all_ranks(view: View, tier: TierRules) -> bool:
    """Say whether all ranks come to the same answer about what the tier retains: of several, only by rules that go by
    steps and attempts alone."""
    return not view.many_ranks or all(rule.policy.alike for rule in tier.retain)


def _why_not_any_more(
    view: View, checkpoint: CheckpointView, tier: TierRules, held: tuple[CheckpointView, ...]
) -> str | None:
    """Say why a tier that takes copies in another order than they were saved in, and holds ``held`` with a newer one,
    is not to get this one any more; None where its retention would keep it."""
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
    if not tier.retain or not _is_same_on_all_ranks(view, tier):
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
    return (
        checkpoint.live
        and (checkpoint.at_end or checkpoint.ordinal % tier.flush_every == 0)
        and any(checkpoint.readable_on(name) for name in checkpoint.copies)
        and (newest is None or not tier.in_order or checkpoint.id > newest)
    )


def _as_if_there(checkpoint: CheckpointView, tier: TierRules) -> CheckpointView:
    copy = CopyView(state=CopyState.COMMITTED, bytes=0)
    return replace(checkpoint, copies={**checkpoint.copies, tier.name: copy})


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
