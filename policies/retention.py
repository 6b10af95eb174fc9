"""Retention: which committed copies a tier keeps, each with its reason.

Pure: (view, tier) -> one decision per whole copy on that tier, oldest first.
"""

from __future__ import annotations

from tierfall.core.values import CheckpointId
from tierfall.core.view import CheckpointView, Decision, TierRules, Verdict, View
from tierfall.policies.guard import line_is_safe_without, reason_to_keep


def plan_retention(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every whole copy that ``tier_name`` holds.

    Kept: the newest ``retain.last`` live ones (all of them without a rule), and what ``policies.guard`` protects.
    Dropped: the rest; what a person deleted; and what an abandoned line left, once the present line is as safe.
    """
    tier = view.tier(tier_name)
    held = view.on(tier_name)
    live = [c for c in held if c.live]
    kept = live if tier.retain_last is None else live[-tier.retain_last :]
    wanted = {c.id: place for place, c in enumerate(reversed(kept), start=1)}
    gone: set[CheckpointId] = set()
    decisions = []
    for checkpoint in held:
        decision = _decide(view, checkpoint, tier, wanted, frozenset(gone))
        if decision.verdict is Verdict.DROP:
            gone.add(checkpoint.id)
        decisions.append(decision)
    return tuple(decisions)


def _decide(
    view: View,
    checkpoint: CheckpointView,
    tier: TierRules,
    wanted: dict[CheckpointId, int],
    gone: frozenset[CheckpointId],
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
    if checkpoint.id in wanted:
        if tier.retain_last is None:
            return answer(Verdict.KEEP, "no rule asks to drop it")
        return answer(Verdict.KEEP, f"last {wanted[checkpoint.id]} of {tier.retain_last}")
    return answer(Verdict.DROP, f"older than the last {tier.retain_last}")
