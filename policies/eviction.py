"""Eviction: what to give up where bytes are short, oldest first, each with its reason.

Pure: (view, tier, need_bytes, free_bytes) -> drops, and what is still missing. On the host tier an image that a failing
tier is owed may go too, the newest sealed one never: a tier that is down must not stop training.
"""

from __future__ import annotations

from tierfall.core.values import CheckpointId, CopyState, TierKind
from tierfall.core.view import CheckpointView, Decision, Eviction, TierRules, Verdict, View
from tierfall.policies.guard import only_source_for, reason_to_keep


def plan_eviction(view: View, tier_name: str, *, need_bytes: int, free_bytes: int) -> Eviction:
    """Choose copies to drop until ``need_bytes`` are free."""
    tier = view.tier(tier_name)
    drops: list[Decision] = []
    gone: set[CheckpointId] = set()
    held = view.on(tier_name)
    for checkpoint in sorted(held, key=lambda c: (c.live, c.id)):
        if free_bytes >= need_bytes:
            break
        reason = _reason_to_go(view, checkpoint, tier, held, frozenset(gone))
        if reason is None:
            continue
        copy = checkpoint.copies[tier_name]
        drops.append(
            Decision(
                checkpoint=checkpoint.id,
                tier=tier_name,
                verdict=Verdict.DROP,
                reason=reason,
                bytes=copy.bytes,
            )
        )
        gone.add(checkpoint.id)
        free_bytes += copy.bytes
    return Eviction(drops=tuple(drops), missing_bytes=max(0, need_bytes - free_bytes))


def _reason_to_go(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    held: tuple[CheckpointView, ...],
    gone: frozenset[CheckpointId],
) -> str | None:
    if tier.kind is TierKind.HOST:
        leased = checkpoint.copies[tier.name].leased
        return None if leased else reason_to_leave_memory(view, checkpoint, tier, held)
    if reason_to_keep(view, checkpoint, tier, gone) is not None:
        return None
    return "room is needed and it is the oldest that may go"


def reason_to_leave_memory(
    view: View, checkpoint: CheckpointView, tier: TierRules, held: tuple[CheckpointView, ...]
) -> str | None:
    """Say why one of the images in memory, ``held``, may go once nobody reads it; None where it may not.

    An older one goes once no lower tier needs it; the newest sealed one only where memory holds no second image, and
    only once it is durable below: else there could be no further save at all."""
    live = [c for c in held if c.live]
    if _is_the_only_pinned_copy(view, checkpoint, tier):
        return None
    waiting = only_source_for(view, checkpoint, tier)
    if live and checkpoint.id == live[-1].id:
        durable = any(checkpoint.state(t.name) is CopyState.COMMITTED for t in view.tiers)
        alone = not any(
            other.id != checkpoint.id and other.state(tier.name) is not CopyState.ABSENT
            for other in view.checkpoints
        )
        return (
            "it is durable below, and memory has room for one image only"
            if durable and alone
            else None
        )
    if checkpoint.tombstoned or not waiting:
        return "oldest in memory that no lower tier still needs"
    if all(name in view.failing for name in waiting):
        return f"memory is full, and {', '.join(waiting)} does not take copies at present"
    return None


def _is_the_only_pinned_copy(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    return checkpoint.pinned and not any(
        checkpoint.readable_on(other.name) for other in view.tiers if other.name != tier.name
    )
