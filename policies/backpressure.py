"""Back-pressure: which checkpoint a new save supersedes if memory is full, and what a full tier is relieved of.

Pure: (view, tier, what would fit) -> decisions, each with its reason. Only an image that no stored tier has is
superseded, and only if no promise depends on it; an image that a stored tier has leaves memory by eviction. The
``when_full`` of the tiers that an image is owed to decides whether it may be superseded, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tierfall.core.types.values import CheckpointId, CopyState, WhenFull
from tierfall.core.types.view import CheckpointView, Decision, TierRules, Verdict, View
from tierfall.policies.eviction import reason_to_leave_memory
from tierfall.policies.flush import owed_in_time
from tierfall.policies.protection import (
    lineage_is_safe_without,
    newest_on_its_way,
    only_source_for,
    reason_to_keep,
    reason_to_keep_start,
)

Fits = Callable[[frozenset[CheckpointId]], bool]


def plan_superseding(view: View, tier_name: str, *, fits: Fits) -> tuple[Decision, ...]:
    """Decide on the images of a host tier, up to the first that is superseded; at most one is.

    First the images that any tier may do without, oldest first; then, newest first, those that are owed only to tiers
    with ``when_full: skip``. None is superseded if room becomes free anyway, or if all that may be superseded would not
    free enough. ``fits`` returns whether the save has room once those images are deleted.
    """
    tier = view.tier(tier_name)
    held = _superseding_order(view, tier)
    reasons = {c.id: reason_to_hold(view, c, tier) for c in held}
    leaving = _leaving(view, tier)
    room_becomes_free = fits(leaving)
    not_enough = not fits(leaving | {id for id, reason in reasons.items() if reason is None})
    decisions = []
    for checkpoint in held:
        reason = reasons[checkpoint.id]
        if reason is None and room_becomes_free:
            reason = "images that are leaving memory free enough room"
        if reason is None and not_enough:
            reason = "superseding all that may be superseded would not free enough room"
        verdict = Verdict.DROP if reason is None else Verdict.KEEP
        why = reason or _reason_to_supersede(view, checkpoint, tier)
        decisions.append(checkpoint.decided(tier_name, verdict, why))
        if verdict is Verdict.DROP:
            break
    return tuple(decisions)


def _superseding_order(view: View, tier: TierRules) -> tuple[CheckpointView, ...]:
    """Sort the images of a host tier in the order in which they may be superseded."""
    held = sorted(view.on(tier.name), key=lambda c: (c.live, c.id))
    skipped = [c for c in held if c.live and when_full_of(view, c, tier) is WhenFull.SKIP]
    return (*(c for c in held if c not in skipped), *reversed(skipped))


def when_full_of(view: View, checkpoint: CheckpointView, tier: TierRules) -> WhenFull:
    """Combine the ``when_full`` of the tiers that an image is held for: ``wait`` if any of them has that, else
    ``supersede`` if any has that, else ``skip``."""
    rules = {rule for _, rule in _rules_of(view, checkpoint, tier)}
    if WhenFull.WAIT in rules:
        return WhenFull.WAIT
    return WhenFull.SKIP if rules == {WhenFull.SKIP} else WhenFull.SUPERSEDE


def _rules_of(
    view: View, checkpoint: CheckpointView, tier: TierRules
) -> tuple[tuple[str, WhenFull], ...]:
    """Return the tiers that an image is held for, without failing ones, each with its ``when_full``. The default is
    ``wait``, or ``supersede`` where the host tier has that."""
    supersedes = tier.when_full is WhenFull.SUPERSEDE
    inherited = WhenFull.SUPERSEDE if supersedes else WhenFull.WAIT
    return tuple(
        (name, view.tier(name).when_full or inherited)
        for name in only_source_for(view, checkpoint, tier)
        if name not in view.failing
    )


def _reason_to_supersede(view: View, checkpoint: CheckpointView, tier: TierRules) -> str:
    if when_full_of(view, checkpoint, tier) is WhenFull.SKIP:
        waiting = ", ".join(only_source_for(view, checkpoint, tier))
        return f"it is the newest unflushed one that no promise depends on, and {waiting} skips it"
    return "it is the oldest unflushed one that no promise depends on"


def reason_to_hold(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    """Return why an image in memory must not be superseded; None if it may be."""
    if view.restoring:
        return "a restore is reading"
    if checkpoint.pinned:
        return "pinned"
    return (
        _reason_nothing_is_owed(view, checkpoint, tier)
        or _reason_to_wait(view, checkpoint, tier)
        or reason_to_keep_start(view, checkpoint, tier)
        or owed_in_time(view, checkpoint)
        or _reason_it_is_needed(view, checkpoint, tier)
    )


def _reason_nothing_is_owed(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    if checkpoint.deleted:
        return "deleted by a person already"
    if checkpoint.changing:
        return "a copy of it is in progress"
    if leaving := [t.name for t in view.tiers if t != tier and _is_leaving(checkpoint, t)]:
        return f"{', '.join(leaving)} has it until it is deleted there, which a pin may prevent"
    if below := [t.name for t in view.tiers if t != tier and checkpoint.readable_on(t.name)]:
        return f"not lost by leaving memory: {', '.join(below)} has it"
    return None if checkpoint.owed else "no tier is owed it"


def _reason_to_wait(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    if when_full_of(view, checkpoint, tier) is not WhenFull.WAIT:
        return None
    waiting = [n for n, rule in _rules_of(view, checkpoint, tier) if rule is WhenFull.WAIT]
    return f"saves wait for {', '.join(waiting)} (when_full: wait)"


def _reason_it_is_needed(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    """Invariant 3, for an image that only memory has."""
    if not checkpoint.live:
        safe = lineage_is_safe_without(view, checkpoint, tier)
        return (
            None
            if safe
            else "its lineage was abandoned, but the new one has no copy that is as safe yet"
        )
    if checkpoint.id == max(c.id for c in view.on(tier.name) if c.live):
        return "the newest in memory"
    if lost := newest_on_its_way(view, checkpoint):
        return f"the newest that will survive the loss of a {lost}"
    return None


def _is_leaving(checkpoint: CheckpointView, tier: TierRules) -> bool:
    return checkpoint.state(tier.name) is CopyState.LEAVING


def _leaving(view: View, tier: TierRules) -> frozenset[CheckpointId]:
    """Return the images that are deleted from memory once their leases end."""
    held = view.on(tier.name)
    return frozenset(
        c.id
        for c in view.checkpoints
        if _is_leaving(c, tier)
        or (c in held and reason_to_leave_memory(view, c, tier, held) is not None)
    )


def plan_relief(view: View, tier_name: str, *, missing_bytes: int) -> tuple[Decision, ...]:
    """Give up the copies of one checkpoint that slower tiers are owed, so that a full tier may delete it; each decision
    is of one of those tiers. Empty if all checkpoints that may be given up do not free ``missing_bytes``."""
    tier = view.tier(tier_name)
    candidates = [c for c in view.on(tier_name) if _may_be_given_up(view, c, tier)]
    if sum(c.copies[tier_name].bytes for c in candidates) < missing_bytes:
        return ()
    skipped = [c for c in candidates if _rules(view, c, tier) == {WhenFull.SKIP}]
    superseded = [c for c in candidates if c not in skipped]
    for checkpoint in (*superseded, *reversed(skipped)):
        which = "newest" if checkpoint in skipped else "oldest"
        return tuple(
            Decision(
                checkpoint=checkpoint.id,
                tier=behind,
                verdict=Verdict.DROP,
                reason=f"{tier_name} is full of copies that {behind} is owed; it is the {which} of them that no "
                "promise depends on",
                bytes=checkpoint.copies[tier_name].bytes,
            )
            for behind in only_source_for(view, checkpoint, tier)
        )
    return ()


def _rules(view: View, checkpoint: CheckpointView, tier: TierRules) -> set[WhenFull]:
    waiting = only_source_for(view, checkpoint, tier)
    return {view.tier(name).when_full or WhenFull.WAIT for name in waiting}


def _may_be_given_up(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    waiting = only_source_for(view, checkpoint, tier)
    if not waiting or WhenFull.WAIT in _rules(view, checkpoint, tier):
        return False
    leaving = any(_is_leaving(checkpoint, t) for t in view.tiers)
    held = (
        view.restoring
        or not checkpoint.live
        or checkpoint.changing
        or leaving
        or reason_to_keep_start(view, checkpoint, tier)
        or owed_in_time(view, checkpoint)
        or newest_on_its_way(view, checkpoint)
    )
    if held:
        return False
    alone = replace(checkpoint, owed=checkpoint.owed - set(waiting))
    as_if = replace(
        view, checkpoints=tuple(alone if c.id == alone.id else c for c in view.checkpoints)
    )
    return reason_to_keep(as_if, alone, tier, frozenset()) is None
