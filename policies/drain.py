"""Drain: which copies can still become durable before a deadline, in which order, and what will be lost.

Pure: (view, rates, time left) -> one decision for each copy that a tier is owed, in the order of copying. Copies that
were begun are first, then the newest; of one checkpoint, the tier that survives the most severe loss. A copy that
cannot arrive in time is not begun. One that was begun and cannot arrive continues only if no other copy could arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierfall.core.types.units import format_duration, format_rate, format_size
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import ArrivalOutlook, CheckpointView, DrainDecision, View


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitingCopy:
    """A copy that a tier is owed and does not have."""

    checkpoint: CheckpointView
    tier: str
    left_bytes: int
    begun: bool


def plan_drain(
    view: View,
    *,
    bytes_per_s: Mapping[str, float | None],
    left_s: float,
) -> tuple[DrainDecision, ...]:
    """Decide on every copy of a live checkpoint that is owed, in the order of copying.

    ``bytes_per_s`` is the rate at which copies arrive at each tier, in bytes of images (None, or missing: unknown, and
    a copy is tried); ``left_s`` the seconds until the deadline. Tiers are written in parallel, each one copy after the
    other.
    """
    spent_s: dict[str, float] = {}
    decisions = []
    for copy in sorted(_waiting(view), key=lambda copy: _sort_key(view, copy)):
        rest_s = left_s - spent_s.get(copy.tier, 0.0)
        decision = _decide(view, copy, bytes_per_s.get(copy.tier), rest_s)
        if decision.outlook is ArrivalOutlook.ARRIVES:
            rate = bytes_per_s[copy.tier]
            assert rate is not None
            spent_s[copy.tier] = spent_s.get(copy.tier, 0.0) + copy.left_bytes / rate
        decisions.append((copy, decision))
    return tuple(_settled(copy, decision, decisions) for copy, decision in decisions)


def _waiting(view: View) -> list[_WaitingCopy]:
    return [
        _WaitingCopy(
            checkpoint=checkpoint,
            tier=tier.name,
            left_bytes=_left_bytes(checkpoint, tier.name),
            begun=checkpoint.state(tier.name) is CopyState.ARRIVING,
        )
        for checkpoint in view.checkpoints
        for tier in view.tiers
        if checkpoint.live
        and tier.name in checkpoint.owed
        and not checkpoint.readable_on(tier.name)
    ]


def _left_bytes(checkpoint: CheckpointView, tier: str) -> int:
    """Bytes of the image that have not arrived. The size of the image is that of its largest copy."""
    image_bytes = max((copy.bytes for copy in checkpoint.copies.values()), default=0)
    there = checkpoint.copies.get(tier)
    return max(0, image_bytes - (there.arrived_bytes if there else 0))


def _sort_key(view: View, copy: _WaitingCopy) -> tuple[bool, int, int, int]:
    """Sort key: begun, then newest, then the tier that survives the most severe loss."""
    id = copy.checkpoint.id
    return (not copy.begun, -id.step, -id.attempt, -view.tier(copy.tier).survives.extent)


def _decide(view: View, copy: _WaitingCopy, rate: float | None, rest_s: float) -> DrainDecision:
    def answer(prospect: ArrivalOutlook, reason: str) -> DrainDecision:
        return DrainDecision(
            checkpoint=copy.checkpoint.id,
            tier=copy.tier,
            outlook=prospect,
            left_bytes=copy.left_bytes,
            proceeds=prospect is not ArrivalOutlook.TOO_LATE,
            reason=reason,
        )

    left = f"{format_size(copy.left_bytes)} {'is' if copy.left_bytes == 1 else 'are'} left"
    if rest_s <= 0:
        return answer(ArrivalOutlook.TOO_LATE, f"{left}, and no time is left")
    if copy.tier in view.failing:
        return answer(
            ArrivalOutlook.UNKNOWN, f"{left}, and {copy.tier} does not accept copies at present"
        )
    if rate is None:
        return answer(
            ArrivalOutlook.UNKNOWN, f"{left}, and the rate of {copy.tier} is not known yet"
        )
    if copy.left_bytes <= rest_s * rate:
        duration = format_duration(copy.left_bytes / rate)
        return answer(
            ArrivalOutlook.ARRIVES, f"{left}, which take {duration} at {format_rate(rate)}"
        )
    carried = f"{format_duration(rest_s)} at {format_rate(rate)} carry {format_size(rest_s * rate)}"
    return answer(ArrivalOutlook.TOO_LATE, f"{left}, {carried}")


def _settled(
    copy: _WaitingCopy,
    decision: DrainDecision,
    decisions: Sequence[tuple[_WaitingCopy, DrainDecision]],
) -> DrainDecision:
    """A copy that was begun and is too late is aborted for another that can arrive on its tier, else it continues."""
    if not copy.begun or decision.outlook is not ArrivalOutlook.TOO_LATE:
        return decision
    if any(
        other.tier == copy.tier and not other.begun and its.outlook is ArrivalOutlook.ARRIVES
        for other, its in decisions
    ):
        return replace(decision, displaced=True)
    return replace(decision, proceeds=True)


def describe_drain(decisions: Sequence[DrainDecision]) -> tuple[str, ...]:
    """Describe each checkpoint, the newest first: which tiers will have it, which will not, and why not."""
    by_id: dict[CheckpointId, list[DrainDecision]] = {}
    for decision in decisions:
        by_id.setdefault(decision.checkpoint, []).append(decision)
    return tuple(_sentence(id, by_id[id]) for id in sorted(by_id, reverse=True))


def _sentence(id: CheckpointId, decisions: Sequence[DrainDecision]) -> str:
    arriving, late, unknown = (
        [d for d in decisions if d.outlook is prospect]
        for prospect in (ArrivalOutlook.ARRIVES, ArrivalOutlook.TOO_LATE, ArrivalOutlook.UNKNOWN)
    )
    parts = []
    if arriving:
        parts.append(f"will be on {_names(arriving)}")
    if late:
        parts.append(
            f"{'' if arriving else 'will '}not {'' if arriving else 'be '}on {_names(late)}"
        )
    if unknown:
        parts.append(f"may arrive on {_names(unknown)}")
    why = "; ".join(dict.fromkeys(d.reason for d in (*late, *unknown)))
    return f"step {id} {', '.join(parts)}" + (f": {why}" if why else "")


def _names(decisions: Sequence[DrainDecision]) -> str:
    return " and ".join(d.tier for d in decisions)
