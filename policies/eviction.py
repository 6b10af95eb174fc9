"""Eviction: which copies a tier deletes to free bytes, or above its high watermark, each with its reason.

Pure: (view, tier, need_bytes, free_bytes) -> deletions, and the bytes still missing. A stored tier has an order of
eviction. On the host tier the oldest is first; an image that only failing tiers are owed may be deleted too, as a tier
that is down must not stop training, but never the newest sealed one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierfall.core.types.units import format_rate
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind
from tierfall.core.types.view import (
    CheckpointView,
    Decision,
    Eviction,
    TierRules,
    TierView,
    Verdict,
    View,
)
from tierfall.policies.protection import (
    counting,
    only_source_for,
    reason_to_keep,
    reason_to_keep_start,
)
from tierfall.policies.registry import Order, call_order, register
from tierfall.policies.retention import kept_by_rules

_OLDEST = "it is the oldest that may be deleted"


def plan_eviction(view: View, tier_name: str, *, need_bytes: int, free_bytes: int) -> Eviction:
    """Choose copies to delete until ``need_bytes`` are free; if these raise a stored tier above its high watermark,
    until it is at the low one with them. ``missing_bytes`` is relative to ``need_bytes`` only."""
    tier = view.tier(tier_name)
    held = view.on(tier_name)
    wanted_bytes = _wanted_free_bytes(tier, need_bytes, free_bytes)
    drops: list[Decision] = []
    gone: set[CheckpointId] = set()
    for checkpoint, why in _in_order(view, tier, held):
        if free_bytes >= wanted_bytes:
            break
        reason = _reason_to_evict(view, checkpoint, tier, held, frozenset(gone), why)
        if reason is None:
            continue
        drops.append(checkpoint.decided(tier_name, Verdict.DROP, reason))
        gone.add(checkpoint.id)
        free_bytes += drops[-1].bytes
    return Eviction(deletions=tuple(drops), missing_bytes=max(0, need_bytes - free_bytes))


def _wanted_free_bytes(tier: TierRules, need_bytes: int, free_bytes: int) -> int:
    """Return the bytes that are to be free before ``need_bytes`` are copied to a tier."""
    capacity = tier.capacity_bytes
    if capacity is None or not tier.is_high(capacity - free_bytes + need_bytes):
        return need_bytes
    low = tier.evict_high if tier.evict_low is None else tier.evict_low
    assert low is not None
    return need_bytes + capacity - int(low * capacity)


def _in_order(
    view: View, tier: TierRules, held: tuple[CheckpointView, ...]
) -> Iterator[tuple[CheckpointView, str]]:
    """Yield each copy in the order of eviction, with the reason for its place: first those that no rule of retention
    keeps. Within these the tier's order applies."""
    if tier.kind is TierKind.HOST:
        yield from ((c, "") for c in sorted(held, key=lambda c: (c.live, c.id)))
        return
    ordered = call_order(
        tier.evict, cheapest_first, view=view, tier=tier, about=held, omitted=_OLDEST
    )
    wanted = kept_by_rules(view, tier, held)
    for checkpoint, why in sorted(ordered, key=lambda one: one[0].id in wanted):
        kept = wanted.get(checkpoint.id)
        yield checkpoint, f"{why}, though a rule would keep it ({kept})" if kept else why


def _reason_to_evict(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    held: tuple[CheckpointView, ...],
    gone: frozenset[CheckpointId],
    why: str,
) -> str | None:
    if tier.kind is TierKind.HOST:
        leased = checkpoint.copies[tier.name].leased
        return None if leased else reason_to_leave_memory(view, checkpoint, tier, held)
    if reason_to_keep(view, checkpoint, tier, gone, for_room=True) is not None:
        return None
    return f"room is needed and {why}"


def reason_to_leave_memory(
    view: View, checkpoint: CheckpointView, tier: TierRules, held: tuple[CheckpointView, ...]
) -> str | None:
    """Return why one of the images in memory, ``held``, may be deleted once nothing reads it; None if it may not.

    An older one may be deleted once no slower tier needs it, and peer memory has a newer checkpoint; the newest sealed
    one only if memory has no second image, and once it is durable, or where no tier is owed it: otherwise no further
    save would be possible."""
    live = [c for c in held if c.live]
    elsewhere = (other.name for other in view.tiers if other.name != tier.name)
    if checkpoint.pinned and not any(map(checkpoint.readable_on, elsewhere)):
        return None
    is_newest = bool(live) and checkpoint.id == live[-1].id
    if not is_newest and _completes_peer_memory(view, checkpoint):
        return None
    waiting = only_source_for(view, checkpoint, tier)
    if is_newest:
        durable = any(checkpoint.state(t.name) is CopyState.COMMITTED for t in view.tiers)
        others = [
            other
            for other in view.checkpoints
            if other.id != checkpoint.id and other.state(tier.name) is not CopyState.ABSENT
        ]
        never = checkpoint.state(tier.name) is CopyState.SEALED and not checkpoint.owed
        if not all(_completes_peer_memory(view, other) for other in others):
            return None
        stuck = bool(others and waiting) and all(name in view.failing for name in waiting)
        if not (durable or never or stuck):
            return None
        why = "it is durable below" if durable else "no tier is owed it"
        if stuck:
            why = f"{', '.join(waiting)} does not accept copies at present"
        beside = " beside what peer memory relies on" if others else ""
        return f"{why}, and memory has room for one image only{beside}"
    if checkpoint.deleted or not waiting:
        return "oldest in memory that no lower tier still needs"
    if all(name in view.failing for name in waiting):
        return f"memory is full, and {', '.join(waiting)} does not accept copies at present"
    return None


def _completes_peer_memory(view: View, checkpoint: CheckpointView) -> bool:
    """Return whether this image is one of the copies that peer memory counts on. The node that keeps the other copy may
    be the one that is lost.

    These are the images of the newest checkpoint that survives the loss of a node. So are those of the restored one
    until a newer one is durable, those of a newer one of which other nodes have lost parts, and those of the newest one
    on too few nodes that may have been reported. None counts if another tier that survives that loss has the
    checkpoint. The restored one is whole. If it is not to be sent to other nodes, no older one with lost parts counts.
    """
    peers = [tier for tier in view.tiers if tier.kind is TierKind.PEER]
    if not peers:
        return False
    on_peers = {tier.name for tier in peers}
    surviving = tuple(t.name for t in view.tiers if t.survives.covers(LossClass.NODE))
    if any(checkpoint.readable_on(name) for name in surviving if name not in on_peers):
        return False
    if reason_to_keep_start(view, checkpoint, peers[0]):
        return True
    replaces_partial = has_newer_on_few = False
    for newer in view.live:
        on_few_nodes = {name for name in on_peers if view.is_on_few_nodes(newer, name)}
        may_be_reported = any(view.on_few_nodes[name, newer.id] for name in on_few_nodes)
        if any(newer.readable_on(name) for name in surviving if name not in on_few_nodes):
            return newer.id == checkpoint.id
        if newer.id == checkpoint.id:
            if may_be_reported:
                return not has_newer_on_few
            is_partial = any((name, newer.id) in view.partial for name in on_peers)
            return is_partial and not replaces_partial
        is_to_be_sent = bool(newer.owed & on_peers - view.failing)
        has_newer_on_few |= may_be_reported
        replaces_partial |= newer.id == view.restored_from and not is_to_be_sent
    return False


@register("evict", "cheapest", words=lambda rules: "the cheapest to lose first")
def cheapest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Delete abandoned checkpoints first; then those that another tier has that survives as much, the fastest to
    restore from there first; then those that no other tier has as safely. In each group the oldest is first."""
    places = {rules.name: place for place, rules in enumerate(_fastest_first(tier.view))}

    def score(checkpoint: CheckpointView) -> tuple[bool, int, CheckpointId]:
        elsewhere = _elsewhere(checkpoint, tier)
        cost = places[elsewhere.name] if elsewhere else len(places)
        return (checkpoint.live, cost, checkpoint.id)

    ordered = sorted(tier.checkpoints, key=score)
    return [(c.id, _describe(c, _elsewhere(c, tier), tier.view)) for c in ordered]


@register("evict", "oldest", words=lambda rules: "the oldest first")
def oldest_first(tier: TierView, rules: None, now_s: float) -> Order:
    """Delete abandoned checkpoints first, then the oldest."""
    ordered = sorted(tier.checkpoints, key=lambda c: (c.live, c.id))
    return [(c.id, _describe(c, None, tier.view)) for c in ordered]


def _fastest_first(view: View) -> list[TierRules]:
    """Sort the tiers by measured read rate. Tiers without a measurement keep their positions in the chain; the measured
    ones are sorted among the other positions."""
    rates = view.read_bytes_per_s
    measured = (tier for tier in view.tiers if tier.name in rates)
    sorted_tiers = iter(sorted(measured, key=lambda tier: rates[tier.name], reverse=True))
    return [next(sorted_tiers) if tier.name in rates else tier for tier in view.tiers]


def _elsewhere(checkpoint: CheckpointView, tier: TierView) -> TierRules | None:
    """Return the tier that a restore would read it from, of the others that have it as safely as this one."""
    return min(
        (
            other
            for other in counting(tier.view, tier.tier)
            if other.name != tier.tier.name
            and checkpoint.state(other.name) is CopyState.COMMITTED
            and other.survives.covers(tier.tier.survives)
        ),
        key=lambda other: not tier.view.is_safe(checkpoint, other.name),
        default=None,
    )


def _describe(checkpoint: CheckpointView, elsewhere: TierRules | None, view: View) -> str:
    if not checkpoint.live:
        return "it is of an abandoned lineage" if checkpoint.abandoned else "deleted by a person"
    if elsewhere is not None:
        rate = view.read_bytes_per_s.get(elsewhere.name)
        read = "" if rate is None else f", read at {format_rate(rate)}"
        return f"{elsewhere.name} holds it as safely{read}"
    return _OLDEST
