"""Retention: which committed copies a tier keeps, each with its reason.

Pure: (view, tier) -> one decision per whole copy on that tier, oldest first, then one per damaged copy. A copy that any
rule keeps is kept, so that a further rule never deletes more. No rule counts a damaged copy when it decides about
another one. A reason has the facts, then the rules as the configuration has them. The rules are below; ``protection``
has what no rule may delete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from tierfall.core.types.text import format_some, hint_at
from tierfall.core.types.units import format_period
from tierfall.core.types.values import CheckpointId, Direction
from tierfall.core.types.view import CheckpointView, Decision, TierRules, TierView, Verdict, View
from tierfall.policies.protection import lineage_is_safe_without, only_good_copy, reason_to_keep
from tierfall.policies.registry import register

DAY_S = 86_400.0
KEPT_BY_AGE = 2
"""This many verified checkpoints are kept on a tier at any age: a clock may be wrong, or a job down for long."""


def plan_retention(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Decide on every copy that ``tier_name`` holds: on a damaged one as if it were whole.

    Kept: what a rule of ``retain`` keeps (everything without a rule), and what ``policies.protection`` protects.
    Deleted: the rest; what a person deleted; and abandoned checkpoints, once the present lineage is as safe.
    """
    tier, held = view.tier(tier_name), view.on(tier_name)
    found = (*held, *_damaged_as_whole(view, tier))
    return _decide_oldest_first(view, tier, found, kept_by_rules(view, tier, held))


def plan_drops(view: View, tier_name: str) -> tuple[Decision, ...]:
    """Return only the deletions of ``plan_retention``: the copies that are kept may be thousands. A rule that keeps a
    damaged copy among all others keeps it among the good ones."""
    tier, held = view.tier(tier_name), view.on(tier_name)
    damaged = _damaged_as_whole(view, tier)
    wanted = kept_by_rules(view, tier, held)
    kept = wanted | (kept_by_rules(view, tier, (*held, *damaged)) if damaged else {})
    loose = tuple(c for c in (*held, *damaged) if not c.live or (tier.retain and c.id not in kept))
    decisions = _decide_oldest_first(view, tier, loose, wanted)
    return tuple(decision for decision in decisions if decision.verdict is Verdict.DROP)


def _damaged_as_whole(view: View, tier: TierRules) -> list[CheckpointView]:
    """Return the checkpoints with a damaged copy on a tier as if that were whole, oldest first."""
    found = (c for c in view.checkpoints if tier.name in c.damaged)
    whole = (replace(c, copies={**c.copies, tier.name: c.damaged[tier.name]}) for c in found)
    return sorted(whole, key=lambda c: c.id)


def _decide_oldest_first(
    view: View,
    tier: TierRules,
    checkpoints: Iterable[CheckpointView],
    wanted: dict[CheckpointId, str],
) -> tuple[Decision, ...]:
    """Decide on one after the other, the oldest first; a deleted one no longer counts for those after it. ``wanted`` is
    what the rules keep of the good copies; no damaged one is counted for another."""
    gone: set[CheckpointId] = set()
    decisions = []
    for checkpoint in checkpoints:
        kept = wanted
        if tier.name in checkpoint.damaged:
            kept = kept_by_rules(view, tier, (*view.on(tier.name), checkpoint))
        decision = _decide(view, checkpoint, tier, kept, gone)
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
    """Decide on one copy as if the tier had it together with others, and none of these were deleted."""
    return _decide(
        view, checkpoint, tier, kept_by_rules(view, tier, (*beside, checkpoint)), frozenset()
    )


def kept_by_rules(
    view: View, tier: TierRules, checkpoints: Iterable[CheckpointView]
) -> dict[CheckpointId, str]:
    """Return which of these the rules of a tier would keep if it had them all, and why: ``3rd newest; last: 3``. Only
    live ones count."""
    if not tier.retain:
        return {}
    tier_view = _tier_view(view, tier, checkpoints)
    reasons: dict[CheckpointId, list[tuple[str, object]]] = {}
    for rule in tier.retain:
        for id, fact in rule.policy.decide(tier_view, rule.rules, view.wall_time_s).items():
            reasons.setdefault(id, []).append((fact, rule))
    if by_age := [rule for rule in tier.retain if rule.policy.due is not None]:
        for id in _last_verified(view, tier_view):
            reasons.setdefault(id, [(f"one of the last {KEPT_BY_AGE} verified", by_age[0])])
    return {id: _of_rules(*zip(*found, strict=True)) for id, found in reasons.items()}


def _of_rules(facts: Iterable[str], rules: Iterable[object]) -> str:
    return f"{', '.join(facts)}; {', '.join(map(str, rules))}"


def _last_verified(view: View, tier_view: TierView) -> list[CheckpointId]:
    """Return those on a tier with fewer than ``KEPT_BY_AGE`` newer verified ones there."""
    ids = [c.id for c in tier_view.checkpoints]
    safe = [c.id for c in tier_view.checkpoints if view.is_safe(c, tier_view.tier.name)]
    return [id for id in ids if len(safe) < KEPT_BY_AGE or id >= safe[-KEPT_BY_AGE]]


def next_due_s(view: View, tier_name: str) -> float | None:
    """Return the wall time, in seconds, at which a rule may delete a copy although no event occurs; None: never."""
    tier = view.tier(tier_name)
    if all(rule.policy.due is None for rule in tier.retain):
        return None
    tier_view = _tier_view(view, tier, view.on(tier_name))
    times = (
        rule.policy.due(tier_view, rule.rules, view.wall_time_s)
        for rule in tier.retain
        if rule.policy.due is not None
    )
    return min((time for time in times if time is not None), default=None)


def _tier_view(view: View, tier: TierRules, checkpoints: Iterable[CheckpointView]) -> TierView:
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
        if tier.name in checkpoint.damaged:
            reason = f"it is damaged; if it were whole: {reason}"
        return checkpoint.decided(tier.name, verdict, reason)

    guard = reason_to_keep(view, checkpoint, tier, gone)
    if guard is not None:
        return answer(Verdict.KEEP, guard)
    if checkpoint.deleted:
        return answer(Verdict.DROP, "deleted by a person")
    if checkpoint.abandoned:
        if lineage_is_safe_without(view, checkpoint, tier, gone):
            return answer(
                Verdict.DROP,
                "its lineage was abandoned, and the new one has a copy that is as safe",
            )
        return answer(
            Verdict.KEEP,
            "its lineage was abandoned, but the new one has no copy that is as safe yet",
        )
    if not tier.retain:
        return answer(Verdict.KEEP, "no rule deletes it")
    if checkpoint.id in wanted:
        return answer(Verdict.KEEP, wanted[checkpoint.id])
    if damaged := only_good_copy(view, checkpoint, tier):
        return answer(Verdict.KEEP, f"the only good copy: it is damaged on {', '.join(damaged)}")
    return answer(Verdict.DROP, _of_rules(["no rule keeps it"], tier.retain))


def used_metrics(tiers: Iterable[TierRules]) -> list[str]:
    """Return the names of the metrics that ``best`` rules use."""
    rules = (rule.rules for tier in tiers for rule in tier.retain)
    return sorted({rule.metric for rule in rules if isinstance(rule, BestRule)})


def missing_metrics(view: View, *, saves_min: int = 1) -> dict[str, str]:
    """Describe each metric of a ``best`` rule that no checkpoint has, and name the metrics that they have.

    If no checkpoint has any metric, the result is empty before ``saves_min`` saves. Snapshots do not count.
    """
    configured: dict[str, list[str]] = {}
    for tier in view.tiers:
        for rule in tier.retain:
            if isinstance(rule.rules, BestRule):
                configured.setdefault(rule.rules.metric, []).append(tier.name)
    whole = [c for c in view.checkpoints if c.readable] if configured else []
    given = sorted({name for checkpoint in whole for name in checkpoint.metrics})
    if not given and max((c.ordinal for c in whole), default=0) < saves_min:
        return {}
    return {
        metric: _describe_missing(metric, tiers, given)
        for metric, tiers in configured.items()
        if metric not in given
    }


def _describe_missing(metric: str, tiers: list[str], given: list[str]) -> str:
    problem = (
        f'retain.best of {", ".join(tiers)} keeps nothing: no checkpoint has the metric "{metric}"'
    )
    if not given:
        return f"{problem}, nor any other; save takes them as metrics={{...}}"
    return f"{problem}; they have {format_some(given)}{hint_at(metric, given)}"


Kept = dict[CheckpointId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRule:
    """One checkpoint per ``steps`` training steps, or per period of ``period_s`` seconds."""

    steps: int | None = None
    period_s: float | None = None

    def __str__(self) -> str:
        return f"every: {self.steps if self.period_s is None else format_period(self.period_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRule:
    """The ``count`` best by a metric."""

    metric: str
    mode: Direction = Direction.MIN
    count: int = 1

    def __str__(self) -> str:
        return f"best: {{metric: {self.metric}, mode: {self.mode}, count: {self.count}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TagsRule:
    """Checkpoints with one of these tags; with any tag if ``names`` is empty."""

    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"tags: [{', '.join(self.names)}]" if self.names else "tags: true"


@register("retain", "last", rules=int, words=lambda count: f"last: {count}", alike=True)
def keep_last(tier: TierView, count: int, now_s: float) -> Kept:
    """Keep the newest ``count``."""
    newest = reversed(tier.checkpoints[-count:])
    return {c.id: _nth(place, "newest") for place, c in enumerate(newest, start=1)}


def _nth(place: int, what: str) -> str:
    """Format a place in an order: ``newest``, ``2nd newest``."""
    suffix = "th" if 10 < place % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return what if place == 1 else f"{place}{suffix} {what}"


@register("retain", "every", rules=EveryRule, words=str)
def keep_every(tier: TierView, every: EveryRule, now_s: float) -> Kept:
    """Keep the first of each number of steps, or of each period.

    Steps are counted from 0: with 1000, the first checkpoint at or after 1000, at or after 2000 and so on, whether or
    not the cadence saves those steps; and step 0 itself. Periods are counted from 1970 in UTC, so that a day is a day
    of the calendar. The first, not the newest, as no newer one replaces it.
    """
    if every.period_s is not None:
        return _first_of_periods(tier.checkpoints, every.period_s)
    assert every.steps is not None
    firsts: dict[int, CheckpointView] = {}
    for checkpoint in tier.checkpoints:
        firsts.setdefault(checkpoint.id.step // every.steps, checkpoint)
    return {
        c.id: f"first at or after step {number * every.steps}"
        for number, c in firsts.items()
        if number > 0 or c.id.step == 0
    }


def _first_of_periods(checkpoints: Iterable[CheckpointView], period_s: float) -> Kept:
    firsts: dict[int, CheckpointView] = {}
    for checkpoint in checkpoints:
        if checkpoint.wall_time_s is not None:
            firsts.setdefault(math.floor(checkpoint.wall_time_s / period_s), checkpoint)
    return {c.id: "first of its period" for c in firsts.values()}


@register("retain", "best", rules=BestRule, words=str)
def keep_best(tier: TierView, best: BestRule, now_s: float) -> Kept:
    """Keep the best by a metric; of equal ones the newer is better. One without the metric, or with nan, is never
    kept."""
    sign = 1 if best.mode is Direction.MIN else -1
    measured = [c for c in tier.checkpoints if not math.isnan(c.metrics.get(best.metric, math.nan))]
    newest_first = sorted(measured, key=lambda c: c.id, reverse=True)
    ranked = sorted(newest_first, key=lambda c: sign * c.metrics[best.metric])
    return {
        c.id: _nth(place, f"{'lowest' if sign > 0 else 'highest'} {best.metric}")
        for place, c in enumerate(ranked[: best.count], start=1)
    }


def _when_too_old(tier: TierView, seconds: float, now_s: float) -> float | None:
    ends = [c.wall_time_s + seconds for c in tier.checkpoints if c.wall_time_s is not None]
    return min((end for end in ends if end > now_s), default=None)


@register(
    "retain",
    "for",
    rules=float,
    due=_when_too_old,
    words=lambda seconds: f"for: {format_period(seconds)}",
)
def keep_for(tier: TierView, seconds: float, now_s: float) -> Kept:
    """Keep what was saved less than ``seconds`` ago, and what has no time of saving."""
    kept = {}
    for checkpoint in tier.checkpoints:
        if checkpoint.wall_time_s is None:
            kept[checkpoint.id] = "its time of saving is unknown"
        elif now_s < checkpoint.wall_time_s + seconds:
            kept[checkpoint.id] = f"younger than {format_period(seconds)}"
    return kept


@register("retain", "tags", rules=TagsRule, words=str)
def keep_tagged(tier: TierView, tags: TagsRule, now_s: float) -> Kept:
    """Keep what has one of the tags."""
    kept = {}
    for checkpoint in tier.checkpoints:
        found = checkpoint.tags if not tags.names else checkpoint.tags & frozenset(tags.names)
        if found:
            kept[checkpoint.id] = f"tagged {', '.join(sorted(found))}"
    return kept


# Beforehand ------------------------------------------------------------------------------------------


def count_kept(
    rules: TierRules, every_s: float, step_s: float | None
) -> tuple[int, float, tuple[str, ...]]:
    """Return how many checkpoints the rules of a tier keep if one arrives every ``every_s`` seconds, how many more they
    keep each day for ever, and the rules that are not counted."""
    newest, best, per_day = 0, 0, 0.0 if rules.retain else DAY_S / every_s
    unknown = []
    for rule in rules.retain:
        match rule.policy.name, rule.rules:
            case "last", int(count):
                newest = max(newest, count)
            case "for", float(seconds):
                newest = max(newest, KEPT_BY_AGE, math.ceil(seconds / every_s))
            case _, BestRule(count=count):
                best += count
            case _, EveryRule(steps=steps, period_s=period_s) if period_s or step_s:
                period_s = period_s or (steps or 1) * (step_s or 0.0)
                per_day += DAY_S / max(every_s, period_s)
            case _:
                unknown.append(str(rule))
    return newest + best, min(per_day, DAY_S / every_s), tuple(unknown)
