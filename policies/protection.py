"""What no policy may delete: one list of reasons that retention, eviction and the command ``prune`` check.

Invariant 3: never a pinned checkpoint, nor, for each loss class, the newest checkpoint that survives that loss; and
never a copy that is being read, or the only source of a copy that another tier is owed. The copies that a deletion
relies on are verified, or were written by this run. A copy in memory is no reason to delete a stored one, nor is a
newer checkpoint with NaN or Inf if the older one has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from tierfall.core.types.lineage import gone_bad, may_replace
from tierfall.core.types.text import format_some
from tierfall.core.types.values import LOSS_CLASSES, CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import CheckpointView, TierRules, View


def reason_to_keep(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    gone: Set[CheckpointId],
    *,
    for_room: bool = False,
) -> str | None:
    """Return why this copy must be kept; None if it may be deleted. ``gone``: checkpoints that are to be deleted from
    this tier already. ``for_room``: else a newer one finds no room."""
    copy = checkpoint.copies[tier.name]
    if checkpoint.pinned:
        return "pinned"
    if copy.leased:
        return "being read or written"
    if copy.state not in (CopyState.SEALED, CopyState.COMMITTED):
        return f"still {copy.state}"
    if checkpoint.deleted:
        return None
    if owed := only_source_for(view, checkpoint, tier):
        return f"the only source of the copy that {', '.join(owed)} is still owed"
    if reason := reason_to_keep_start(view, checkpoint, tier):
        return reason
    if lost := newest_of(view, checkpoint, tier, gone, for_room=for_room):
        newer = filter(None, (gone_bad(other, checkpoint) for other in view.live))
        without = (
            f" without NaN or Inf in {format_some(sorted(bad))}"
            if (bad := next(newer, None))
            else ""
        )
        return f"the newest{without} that survives the loss of a {lost}"
    return None


def only_source_for(view: View, checkpoint: CheckpointView, tier: TierRules) -> tuple[str, ...]:
    """Return the tiers whose owed copy has no other source."""
    others = [t.name for t in counting(view, tier) if t.name != tier.name]
    if any(checkpoint.readable_on(name) for name in others):
        return ()
    return tuple(t.name for t in view.tiers if t.name in checkpoint.owed)


def only_good_copy(view: View, checkpoint: CheckpointView, tier: TierRules) -> tuple[str, ...]:
    """Return the tiers whose copy is damaged while this one is the only good copy: ``verify --repair`` needs it."""
    others = [t.name for t in view.tiers if t.name != tier.name]
    if any(checkpoint.readable_on(t.name) for t in counting(view, tier) if t.name != tier.name):
        return ()
    return tuple(name for name in others if name in checkpoint.damaged)


def counting(view: View, tier: TierRules) -> Iterator[TierRules]:
    """Yield the tiers whose copies may be a reason to delete one from ``tier``: peer memory is none for a stored tier,
    since a power cut empties it."""
    return (t for t in view.tiers if t.kind is not TierKind.PEER or tier.is_memory)


def newest_of(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    gone: Set[CheckpointId],
    *,
    for_room: bool = False,
) -> LossClass | None:
    """Return the loss class whose newest surviving live checkpoint this copy is, if any; newer copies that are not
    verified do not count. The last abandoned one is kept while no live one survives that loss.

    Copies in memory do not count: they survive the loss of a process, but not a restart of the machine, as files do.
    """
    for lost in reversed(LOSS_CLASSES):
        if not tier.survives.covers(lost):
            continue
        if checkpoint.live:
            safe = _survives_newer(
                view, lost, above=checkpoint, without=tier, gone=gone, for_room=for_room
            )
        else:
            tiers = surviving(view, lost, tier)
            others = any(other.id not in gone for other in view.restorable_on(tiers))
            safe = others or view.newest_abandoned_on(tiers) != checkpoint.id
        if not safe:
            return lost
    return None


def surviving(view: View, lost: LossClass, tier: TierRules) -> tuple[str, ...]:
    """Return the tiers that survive a loss and whose copies may be a reason to delete one from ``tier``."""
    return tuple(t.name for t in counting(view, tier) if t.survives.covers(lost))


def _survives_newer(
    view: View,
    lost: LossClass,
    *,
    above: CheckpointView,
    without: TierRules,
    gone: Set[CheckpointId],
    for_room: bool,
) -> bool:
    """Return whether a live checkpoint of that step or newer survives that loss by another copy. An older one that a
    restart would go back to does as well for one with NaN that is left behind, or if room is needed; and then does one
    with NaN that this start has continued from."""
    is_left = _is_being_abandoned(view, above)
    may_go_back = bool(above.not_finite) and (is_left or for_room)
    tiers = surviving(view, lost, without)
    for alike in view.restorable_alike(tiers):  # usually one of the newest decides
        for other in alike:
            is_older = other.id < above.id
            if for_room:
                is_worse = may_replace(above, other) and other.id != view.restored_from
            else:
                is_worse = bool(gone_bad(other, above))
            if (is_older or is_worse) and not may_go_back:
                break  # so are the rest of these
            if is_worse or (is_older and not may_replace(other, above)):
                continue
            if not is_left and _is_being_abandoned(view, other):
                continue
            stays = other.id != above.id and other.id not in gone
            if any(view.is_safe(other, tier) for tier in tiers if stays or tier != without.name):
                return True
    return False


def _is_being_abandoned(view: View, checkpoint: CheckpointView) -> bool:
    """Return whether a live checkpoint becomes abandoned with the first save of this start, which restored an older
    one."""
    start = view.restored_from
    return (
        start is not None
        and view.attempt is not None
        and checkpoint.id.attempt < view.attempt
        and checkpoint.id.step > start.step
    )


def newest_on_its_way(view: View, checkpoint: CheckpointView) -> LossClass | None:
    """Return the loss class whose newest live checkpoint this one is once its owed copies are committed, if any.

    Copies in memory do not count: only what is durable, or will be.
    """
    for lost in reversed(LOSS_CLASSES):
        if _reaches(view, checkpoint, lost) and not any(
            other.id > checkpoint.id
            and _reaches(view, other, lost)
            and not gone_bad(other, checkpoint)
            for other in view.live
        ):
            return lost
    return None


def _reaches(view: View, checkpoint: CheckpointView, lost: LossClass) -> bool:
    """Return whether a durable copy survives that loss, or would once the owed copies are committed."""
    whole = any(checkpoint.readable_on(tier.name) for tier in view.tiers)
    return whole and any(
        checkpoint.state(tier) is CopyState.COMMITTED or tier in checkpoint.owed
        for tier in (t.name for t in view.tiers if t.survives.covers(lost))
    )


def reason_to_keep_start(view: View, checkpoint: CheckpointView, tier: TierRules) -> str | None:
    """Return why the checkpoint that this run was restored from must be kept on a tier; None for any other, and once
    its lineage has a newer durable one."""
    if view.restored_from == checkpoint.id and not _continued(view, checkpoint, tier):
        return "this run was restored from it, and nothing newer is durable yet"
    return None


def _continued(view: View, checkpoint: CheckpointView, tier: TierRules) -> bool:
    """Return whether the lineage that continued from this checkpoint has a durable one of its own. A newer one of the
    old lineage does not count: it is abandoned with the first save of the new one."""
    return any(
        other.started_from == checkpoint.id
        and (view.attempt is None or other.id.attempt >= view.attempt)
        and any(view.is_safe(other, t.name) for t in counting(view, tier))
        for other in view.live
    )


def lineage_is_safe_without(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    gone: Set[CheckpointId] = frozenset(),
) -> bool:
    """Return whether the lineage that abandoned this checkpoint has a copy that survives as much as this one, and is
    not ``gone`` from the tier with it. A copy in memory does not: files survive a restart of the machine."""
    return any(
        other.id.attempt > checkpoint.id.attempt
        and any(
            t.survives.covers(tier.survives) and view.is_safe(other, t.name)
            for t in counting(view, tier)
            if t.name != tier.name or other.id not in gone
        )
        for other in view.live
    )
