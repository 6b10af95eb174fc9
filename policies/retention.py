"""Retention: which committed copies a tier keeps, each with its reason.

Pure: (view, tier) -> one decision per whole copy on that tier, oldest first. What any rule wants is kept, so another
rule never drops more; what the rules are stands in ``retain_rules``, and what no rule may drop in ``guard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from tierfall.core.values import CheckpointId
from tierfall.core.view import CheckpointView, Decision, TierRules, TierView, Verdict, View
from tierfall.policies.guard import line_is_safe_without, reason_to_keep

KEPT_BY_AGE = 2
"""So many verified checkpoints stay on a tier however old they are: a clock may be wrong, or a job down for long."""


def plan_retention(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every whole copy that ``tier_name`` holds.

    Kept: what a rule of ``retain`` wants (everything without a rule), and what ``policies.guard`` protects. Dropped:
    the rest; what a person deleted; and what an abandoned line left, once the present line is as safe.
    """
    tier = view.tier(tier_name)
    held = view.on(tier_name)
    return _decide_in_turn(view, tier, held, wanted_of(view, tier, held))


def keeps_all_live(tier: TierRules) -> bool:
    """Say whether a tier keeps whatever is neither left behind nor deleted."""
    return not tier.retain


def plan_drops(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Return what ``plan_retention`` drops, without a word on what stays: that may be thousands."""
    tier = view.tier(tier_name)
    held = view.on(tier_name)
    wanted = wanted_of(view, tier, held)
    keeps_all = keeps_all_live(tier)
    loose = tuple(c for c in held if not c.live or not (keeps_all or c.id in wanted))
    decisions = _decide_in_turn(view, tier, loose, wanted)
    return tuple(decision for decision in decisions if decision.verdict is Verdict.DROP)


def _decide_in_turn(
    view: View,
    tier: TierRules,
    checkpoints: Iterable[CheckpointView],
    wanted: dict[CheckpointId, str],
) -> tuple[Decision, ...]:
    """Decide on one after the other, the oldest first: what goes counts as gone for those after it."""
    gone: set[CheckpointId] = set()
    decisions = []
    for checkpoint in checkpoints:
        decision = _decide(view, checkpoint, tier, wanted, gone)
        if decision.verdict is Verdict.DROP:
            gone.add(checkpoint.id)
        decisions.append(decision)
    return tuple(decisions)


def decide_on_one(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    *,
    beside: tuple[CheckpointView, ...],
) -> Decision:
    """Decide on one copy as if it were there beside others; that older ones may go says nothing of it."""
    return _decide(
        view, checkpoint, tier, wanted_of(view, tier, (*beside, checkpoint)), frozenset()
    )


def wanted_of(
    view: View, tier: TierRules, checkpoints: Iterable[CheckpointView]
) -> dict[CheckpointId, str]:
    """Say which of these the rules of a tier would keep if it held them all, and why; only live ones count."""
    if not tier.retain:
        return {}
    asked = _asked(view, tier, checkpoints)
    reasons: dict[CheckpointId, list[str]] = {}
    for rule in tier.retain:
        for id, reason in rule.policy.decide(asked, rule.rules, view.wall_time_s).items():
            reasons.setdefault(id, []).append(reason)
    if any(rule.policy.due is not None for rule in tier.retain):
        for id in _too_few_without(view, asked):
            reasons.setdefault(id, [f"age drops none of the last {KEPT_BY_AGE} verified"])
    return {id: "; ".join(found) for id, found in reasons.items()}


def _too_few_without(view: View, asked: TierView) -> list[CheckpointId]:
    """Name those on a tier of which fewer than ``KEPT_BY_AGE`` newer ones are verified there."""
    ids = [c.id for c in asked.checkpoints]
    safe = [c.id for c in asked.checkpoints if view.is_safe(c, asked.tier.name)]
    return [id for id in ids if len(safe) < KEPT_BY_AGE or id >= safe[-KEPT_BY_AGE]]


def next_due_s(view: View, tier_name: str) -> float | None:
    """Say at which wall time, in seconds, a rule may come to let something go though nothing happens."""
    tier = view.tier(tier_name)
    if all(rule.policy.due is None for rule in tier.retain):
        return None
    asked = _asked(view, tier, view.on(tier_name))
    times = (
        rule.policy.due(asked, rule.rules, view.wall_time_s)
        for rule in tier.retain
        if rule.policy.due is not None
    )
    return min((time for time in times if time is not None), default=None)


def _asked(view: View, tier: TierRules, checkpoints: Iterable[CheckpointView]) -> TierView:
    live = sorted((c for c in checkpoints if c.live), key=lambda c: c.id)
    return TierView(checkpoints=tuple(live), tier=tier, view=view)


def _decide(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    wanted: dict[CheckpointId, str],
    gone: Set[CheckpointId],
) -> Decision:
    def answer(verdict: Verdict, reason: str) -> Decision:
        return Decision(
            checkpoint=checkpoint.id,
            tier=tier.name,
            verdict=verdict,
            reason=reason,
            bytes=checkpoint.copies[tier.name].bytes,
        )

    guard = reason_to_keep(view, checkpoint, tier, gone)
    if guard is not None:
        return answer(Verdict.KEEP, guard)
    if checkpoint.tombstoned:
        return answer(Verdict.DROP, "deleted by a person")
    if checkpoint.abandoned:
        if line_is_safe_without(view, checkpoint, tier):
            return answer(Verdict.DROP, "its line was left behind, and the new one is as safe")
        return answer(Verdict.KEEP, "its line was left behind, but the new one is not as safe yet")
    if not tier.retain:
        return answer(Verdict.KEEP, "no rule asks to drop it")
    if checkpoint.id in wanted:
        return answer(Verdict.KEEP, wanted[checkpoint.id])
    return answer(Verdict.DROP, f"no rule keeps it ({'; '.join(map(str, tier.retain))})")
