"""Flush: which tiers are owed a copy of a checkpoint, and in which order a tier receives the copies.

Pure. A tier is owed the checkpoints whose ordinal its ``flush.every`` divides, and the last one of a training, in the
order of ``flush.order`` (``in_order``, ``newest_first``). Peer memory is owed the newest one of a start, too. At a
start, no tier is owed one that it had and deleted, or that its retention would delete at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tierfall.core.types.units import format_duration
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import (
    CheckpointView,
    CopyView,
    Decision,
    TierRules,
    TierView,
    Verdict,
    View,
)
from tierfall.policies.protection import newest_of, reason_to_keep_start
from tierfall.policies.registry import Order, call_order, register
from tierfall.policies.retention import decide_on_one, kept_by_rules

_IN_MEMORY = (TierKind.DEVICE, TierKind.HOST)


def tiers_owed(
    tiers: tuple[TierRules, ...], ordinal: int, *, at_end: bool = False
) -> tuple[str, ...]:
    """Return the tiers that a new checkpoint of this ordinal is flushed to, fastest first; ``at_end``: all of them."""
    stored = (t for t in tiers if t.kind not in _IN_MEMORY)
    return tuple(t.name for t in stored if at_end or ordinal % t.flush_every == 0)


def still_owed(view: View, checkpoint: CheckpointView) -> tuple[str, ...]:
    """Return the tiers that a checkpoint found at a start is owed to.

    Peer memory is owed the newest one, whether a rule selects it or not, if no tier has it that survives the loss of a
    node: a restore continues from it. Excluded are tiers that have it, also damaged, and tiers that would delete it at
    once in view of those to come. With ``in_order``, tiers with a newer checkpoint of the lineage are excluded too:
    they had it once, or gave it up, unless their records name it as owed. In any other order a newer one proves
    nothing, and a copy that retention would keep is owed.
    """
    if not checkpoint.live:
        return ()
    return tuple(
        name
        for name in _selected(view, checkpoint)
        if not checkpoint.readable_on(name)
        and name not in checkpoint.damaged
        and (name in checkpoint.overtaken or not _has_moved_past(view, checkpoint, view.tier(name)))
        and (checkpoint.pinned or not _would_be_deleted(view, view.tier(name), checkpoint))
    )


def _selected(view: View, checkpoint: CheckpointView) -> tuple[str, ...]:
    named = tiers_owed(view.tiers, checkpoint.ordinal, at_end=checkpoint.at_end)
    outlives_node = any(
        tier.survives.covers(LossClass.NODE) and checkpoint.readable_on(tier.name)
        for tier in view.tiers
    )
    is_newest = any(newest.id == checkpoint.id for newest in view.live[:1])
    return tuple(
        tier.name
        for tier in view.tiers
        if tier.name in named or (is_newest and not outlives_node and tier.kind is TierKind.PEER)
    )


def plan_flush(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every live checkpoint that ``tier_name`` is owed and that is not being copied there: first those that
    are given up, the newest first, then the others in the order of copying."""
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
        reason = _reason_not_needed(view, checkpoint, tier, held) if is_late else None
        if reason is None:
            left.append(checkpoint)
        else:
            given_up.append(_decided(checkpoint, tier, reason, Verdict.DROP))
    ordered = call_order(
        tier.flush_order,
        in_order,
        view=view,
        tier=tier,
        about=left,
        omitted="the order leaves it out, so it is last",
    )
    copied = (_decided(c, tier, reason, Verdict.KEEP) for c, reason in ordered)
    return (*reversed(given_up), *copied)


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
    """Return whether a tier had it once, or gave it up, judging by its checkpoints. False where ranks might come to
    different answers."""
    held = view.on(tier.name)
    newest = _newest_live(held)
    if newest is None or newest < checkpoint.id:
        return False
    if tier.in_order:
        return True
    return (
        _is_same_on_all_ranks(view, tier)
        and _reason_not_needed(view, checkpoint, tier, held) is not None
    )


def _is_same_on_all_ranks(view: View, tier: TierRules) -> bool:
    """Return whether all ranks come to the same answer about a tier's retention: with several ranks, only by rules that
    depend on steps and attempts alone."""
    return not view.many_ranks or all(rule.policy.alike for rule in tier.retain)


def _reason_not_needed(
    view: View, checkpoint: CheckpointView, tier: TierRules, held: tuple[CheckpointView, ...]
) -> str | None:
    """Return why a tier with another order than ``in_order``, which has ``held`` with a newer one, is no longer owed
    this one; None if its retention would keep it."""
    if not tier.retain:
        return None
    arrived = replace(_as_if_there(checkpoint, tier), owed=checkpoint.owed - {tier.name})
    decision = decide_on_one(view, arrived, tier, beside=held)
    if decision.verdict is Verdict.KEEP:
        return None
    return (
        f"newer ones were copied first, and retention would delete it at once ({decision.reason})"
    )


def _would_be_deleted(view: View, tier: TierRules, checkpoint: CheckpointView) -> bool:
    """Return whether the tier would delete it at once: neither a rule nor ``protection`` would keep it among the
    checkpoints there and those to come.

    Ranks must not come to different answers, or some would wait for the shards of others for ever: with several ranks,
    a rule that depends on more than steps and attempts counts as one that keeps it.
    """
    if not tier.retain or not _is_same_on_all_ranks(view, tier):
        return False
    newest = _newest_live(view.on(tier.name))
    expected = {
        c.id: _as_if_there(c, tier)
        for c in view.checkpoints
        if c.id == checkpoint.id or c.readable_on(tier.name) or _is_to_come(c, tier, newest)
    }
    if checkpoint.id in kept_by_rules(view, tier, expected.values()):
        return False
    then = replace(view, checkpoints=tuple(expected.get(c.id, c) for c in view.checkpoints))
    kept = newest_of(then, expected[checkpoint.id], tier, frozenset())
    return kept is None and reason_to_keep_start(then, checkpoint, tier) is None


def _is_to_come(checkpoint: CheckpointView, tier: TierRules, newest: CheckpointId | None) -> bool:
    """Return whether the tier, whose newest one is ``newest``, is owed it."""
    return (
        checkpoint.live
        and (checkpoint.at_end or checkpoint.ordinal % tier.flush_every == 0)
        and checkpoint.readable
        and tier.name not in checkpoint.damaged
        and (newest is None or not tier.in_order or checkpoint.id > newest)
    )


def _as_if_there(checkpoint: CheckpointView, tier: TierRules) -> CheckpointView:
    copy = CopyView(state=CopyState.COMMITTED, bytes=0)
    return replace(checkpoint, copies={**checkpoint.copies, tier.name: copy})


IN_ORDER = "in_order"
"""The default, and the only order in which a newer copy on a tier proves that older ones were copied or given up."""


@register("flush", IN_ORDER)
def in_order(tier: TierView, rules: None, now_s: float) -> Order:
    """Copy them as they were saved."""
    return _each(tier.checkpoints, first="the oldest that waits", before="older")


@register("flush", "newest_first")
def newest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Copy the newest, and older ones after it."""
    return _each(tier.checkpoints[::-1], first="the newest that waits", before="newer")


def _each(checkpoints: Sequence[CheckpointView], *, first: str, before: str) -> Order:
    reasons = (
        f"after {place} {before} {'one' if place == 1 else 'ones'}" if place else first
        for place in range(len(checkpoints))
    )
    return [(c.id, reason) for c, reason in zip(checkpoints, reasons, strict=True)]


def owed_in_time(view: View, checkpoint: CheckpointView) -> str | None:
    """Return the reason that a tier with ``flush.within`` is owed this checkpoint; None if none is."""
    for tier in view.tiers:
        if tier.within_s is not None and tier.name in checkpoint.owed:
            return f"{tier.name} is owed it within {format_duration(tier.within_s)}"
    return None


def lateness(tier: TierRules, behind_s: float) -> str | None:
    """Describe that a tier is further behind than its ``flush.within``; None if it is not. ``behind_s``: the age of the
    oldest checkpoint that is newer than all that the tier has."""
    if tier.within_s is None or behind_s <= tier.within_s:
        return None
    return (
        f"{tier.name} is {format_duration(behind_s)} behind, more than the {format_duration(tier.within_s)} of "
        "flush.within"
    )
