"""What no policy may drop: one list of reasons that retention, eviction and a person's prune all ask.

Invariant 3: never a pinned checkpoint, nor, for each loss class, the newest checkpoint that survives that loss; and
never a copy that somebody reads, or the only source of a copy that another tier is still owed. What a drop relies on
is verified, or was written by this run.
"""

from __future__ import annotations

from collections.abc import Set

from tierfall.core.types.values import LOSS_CLASSES, CheckpointId, CopyState, LossClass
from tierfall.core.types.view import CheckpointView, TierRules, View

DURABLE = CopyState.COMMITTED


def reason_to_keep(
    view: View, checkpoint: CheckpointView, tier: TierRules, gone: Set[CheckpointId]
) -> str | None:
    """Say why this copy must stay, or return None; ``gone`` are checkpoints already to be dropped from this tier."""
    copy = checkpoint.copies[tier.name]
    if checkpoint.pinned:
        return "pinned"
    if copy.leased:
        return "being read or written"
    if copy.state not in (CopyState.SEALED, CopyState.COMMITTED):
        return f"still {copy.state}"
    if checkpoint.tombstoned:
        return None
    if owed := only_source_for(view, checkpoint, tier):
        return f"the only source of the copy that {', '.join(owed)} is still owed"
    if reason := beginning_of_the_line(view, checkpoint):
        return reason
    if lost := newest_of(view, checkpoint, tier, gone):
        return f"the newest that survives the loss of a {lost}"
    return None


def only_source_for(view: View, checkpoint: CheckpointView, tier: TierRules) -> tuple[str, ...]:
    """Name the tiers that could get their copy from nowhere else."""
    others = [t.name for t in view.tiers if t.name != tier.name]
    if any(checkpoint.readable_on(name) for name in others):
        return ()
    return tuple(t.name for t in view.tiers if t.name in checkpoint.owed)


def newest_of(
    view: View, checkpoint: CheckpointView, tier: TierRules, gone: Set[CheckpointId]
) -> LossClass | None:
    """Name the loss class whose newest surviving live checkpoint this copy is, if it is one; newer copies that nobody
    has verified do not count. Of what was left behind the last stays as long as no live one survives that loss.

    Copies in memory do not count here: they survive a process, but not the machine's restart, which files do.
    """
    held = _held if checkpoint.live else _held_at_all
    for lost in reversed(LOSS_CLASSES):
        if not tier.survives.covers(lost):
            continue
        if not held(view, lost, above=checkpoint, without=tier.name, gone=gone):
            return lost
    return None


def _held_at_all(
    view: View,
    lost: LossClass,
    *,
    above: CheckpointView,
    without: str,
    gone: Set[CheckpointId],
) -> bool:
    """Say whether any live checkpoint survives that loss, or a later one than ``above`` that was left behind, too."""
    tiers = tuple(tier.name for tier in view.tiers if tier.survives.covers(lost))
    if any(other.id not in gone for other in view.safe_on(tiers)):
        return True
    return view.last_left_behind_on(tiers) != above.id


def _held(
    view: View,
    lost: LossClass,
    *,
    above: CheckpointView,
    without: str,
    gone: Set[CheckpointId],
) -> bool:
    """Say whether a live checkpoint of that step or newer survives that loss by another copy."""
    left = _is_being_left(view, above)
    tiers = tuple(tier.name for tier in view.tiers if tier.survives.covers(lost))
    for other in view.safe_on(tiers):  # one of the newest mostly answers
        if other.id < above.id:
            return False
        if not left and _is_being_left(view, other):
            continue
        stays = other.id != above.id and other.id not in gone
        if any(view.is_safe(other, tier) for tier in tiers if stays or tier != without):
            return True
    return False


def _is_being_left(view: View, checkpoint: CheckpointView) -> bool:
    """Say whether a live checkpoint is abandoned with the first save of this start, which went back behind it."""
    start = view.restored_from
    return (
        start is not None
        and view.attempt is not None
        and checkpoint.id.attempt < view.attempt
        and checkpoint.id.step > start.step
    )


def newest_on_its_way(view: View, checkpoint: CheckpointView) -> LossClass | None:
    """Name the loss class whose newest live checkpoint this one comes to be once it is where it is owed, if any.

    Copies in memory do not count here either: what is asked for is what is durable, or is to be.
    """
    for lost in reversed(LOSS_CLASSES):
        if _reaches(view, checkpoint, lost) and not any(
            other.id > checkpoint.id and _reaches(view, other, lost) for other in view.live
        ):
            return lost
    return None


def _reaches(view: View, checkpoint: CheckpointView, lost: LossClass) -> bool:
    """Say whether a durable copy survives that loss, or a tier where it would is owed one of what is whole."""
    whole = any(checkpoint.readable_on(tier.name) for tier in view.tiers)
    return whole and any(
        checkpoint.state(tier.name) is DURABLE or tier.name in checkpoint.owed
        for tier in view.tiers
        if tier.survives.covers(lost)
    )


def beginning_of_the_line(view: View, checkpoint: CheckpointView) -> str | None:
    """Say why what this run was restored from must stay; None for any other, and once the line goes on durably."""
    if view.restored_from == checkpoint.id and not _continued(view, checkpoint):
        return "this run was restored from it, and nothing newer is durable yet"
    return None


def _continued(view: View, checkpoint: CheckpointView) -> bool:
    """Say whether the line that began at this checkpoint has a durable one of its own. A newer one of the line that is
    being left says nothing: it is abandoned as soon as the new line has anything."""
    return any(
        other.started_from == checkpoint.id
        and (view.attempt is None or other.id.attempt >= view.attempt)
        and any(view.is_safe(other, tier.name) for tier in view.tiers)
        for other in view.live
    )


def line_is_safe_without(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    """Say whether the line that left this checkpoint behind has a copy that survives as much as this one. What lies
    in memory alone does not: files outlive the machine's restart."""
    return any(
        other.id.attempt > checkpoint.id.attempt
        and any(
            t.survives.covers(tier.survives) and view.is_safe(other, t.name) for t in view.tiers
        )
        for other in view.live
    )
