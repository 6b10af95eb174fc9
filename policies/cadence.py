"""Cadence: how often a run saves, by the measured cost of saving, and why.

Pure. ``choose_interval`` applies the formulas to the measurements; its result names the one that decided. A measured
interval is in training steps, as these are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierfall.core.types.policy import Rule
from tierfall.core.types.units import format_duration, format_period, format_share
from tierfall.core.types.values import LOSS_CLASSES, LossClass, TierKind
from tierfall.core.types.view import TierRules
from tierfall.policies.formulas import checkfreq_steps, daly_s, overhead_steps, pccheck_steps

PROFILE_STEPS = 10
"""Steps that are measured before the first save, and the least number between it and the second."""


def should_save(step: int, *, every_steps: int) -> bool:
    """Return whether ``step`` is a multiple of ``every_steps``; never for step 0."""
    return step > 0 and step % every_steps == 0


class IntervalBound(StrEnum):
    """What decided an interval."""

    EVERY = "every"
    MEASURING = "measuring"
    OVERHEAD = "overhead"
    FAILURES = "failures"
    DURABLE = "durable"
    OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceRules:
    """The configured cadence: one of ``every_steps``, ``every_s`` (seconds), ``overhead`` (a share of training
    time) and ``mtbf_s``, the mean seconds between failures of at least a loss class; or ``own``, a plug-in's policy, in
    whose place ``overhead`` decides if it has no answer."""

    every_steps: int | None = None
    every_s: float | None = None
    overhead: float | None = None
    mtbf_s: Mapping[LossClass, float] = field(default_factory=dict)
    tiers: tuple[TierRules, ...] = ()
    own: Rule | None = None

    @property
    def measured(self) -> bool:
        """Whether the interval depends on measurements."""
        return self.every_steps is None and self.every_s is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a run, in seconds; None: not known yet.

    ``step_s`` is a step while nothing is saved, ``cost_s`` what a save adds to the steps until the next one,
    ``foreground_s`` the part of it that the training thread waits, ``durable_s`` per tier the time from save to commit.
    ``saved``: there was a save; ``images``: how many host memory has room for.
    """

    step_s: float | None = None
    cost_s: float | None = None
    foreground_s: float = 0.0
    durable_s: Mapping[str, float] = field(default_factory=dict)
    saved: bool = False
    images: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChoice:
    """An interval in steps (None: not in steps, or not known yet), what decided it, and the reason."""

    interval_steps: int | None
    bound: IntervalBound
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCadence:
    """The best interval of flushes to a tier, and why: ``interval_s`` seconds, which is ``flush_every`` saves.
    ``mtbf_s`` is the mean time between failures that this tier survives and no faster one."""

    tier: str
    mtbf_s: float | None
    interval_s: float | None
    flush_every: int | None
    reason: str


def choose_interval(
    rules: CadenceRules, measured: Measured, *, now_s: float = 0.0
) -> IntervalChoice:
    """Choose the steps until the next save; ``now_s`` is the wall time, for a plug-in's policy."""
    if rules.every_steps is not None:
        reason = f"interval.every: {_steps(rules.every_steps)}"
        return IntervalChoice(
            interval_steps=rules.every_steps, bound=IntervalBound.EVERY, reason=reason
        )
    if rules.every_s is not None:
        steps = None if not measured.step_s else max(1, round(rules.every_s / measured.step_s))
        reason = f"interval.every: {format_period(rules.every_s)}, at the first step from then on"
        return IntervalChoice(interval_steps=steps, bound=IntervalBound.EVERY, reason=reason)
    if not measured.step_s:
        which = "steps without a copy in progress" if measured.saved else "steps"
        next_one = "next" if measured.saved else "first"
        return _measuring(None, f"{PROFILE_STEPS} {which} are measured before the {next_one} save")
    if not measured.saved:
        return _measuring(1, "the first save, to measure what saving costs")
    if measured.cost_s is None:
        return _second_save(measured, measured.step_s)
    by_cost = _ask_own_policy(rules.own, measured, now_s) or _interval_by_cost(
        rules, measured.step_s, measured.cost_s
    )
    bound = durable_bound(rules, measured)
    if bound is None or (by_cost.interval_steps or 1) >= (bound.interval_steps or 1):
        return by_cost
    return bound


def _ask_own_policy(rule: Rule | None, measured: Measured, now_s: float) -> IntervalChoice | None:
    """Call the plug-in's policy; None if there is none, or it has no answer."""
    answer = None if rule is None else rule.policy.decide(measured, rule.rules, now_s)
    if rule is None or answer is None:
        return None
    steps, reason = answer
    return IntervalChoice(
        interval_steps=steps, bound=IntervalBound.OWN, reason=f"{rule.policy.name}: {reason}"
    )


def _measuring(steps: int | None, why: str) -> IntervalChoice:
    return IntervalChoice(interval_steps=steps, bound=IntervalBound.MEASURING, reason=why)


def _second_save(measured: Measured, step_s: float) -> IntervalChoice:
    """The first save also allocates, and is captured blocking: the second one shows the cost. It is due once the first
    is durable, at CheckFreq's initial interval."""
    full_s = max(measured.durable_s.values(), default=0.0)
    steps = max(PROFILE_STEPS, checkfreq_steps(full_s, measured.foreground_s, step_s))
    return _measuring(steps, "the second save, to measure what saving costs once all is set up")


def _interval_by_cost(rules: CadenceRules, step_s: float, cost_s: float) -> IntervalChoice:
    facts = f"a save costs {format_duration(cost_s)} and a step takes {format_duration(step_s)}"
    if rules.overhead is not None:
        steps = overhead_steps(cost_s, step_s, rules.overhead)
        reason = f"{facts}: {_steps(steps)} keep it within {format_share(rules.overhead)} of the training"
        return IntervalChoice(interval_steps=steps, bound=IntervalBound.OVERHEAD, reason=reason)
    mtbf_s = min(rules.mtbf_s.values())
    best_s = daly_s(cost_s, mtbf_s)
    steps = max(1, round(best_s / step_s))
    reason = f"{facts}: with a failure every {format_duration(mtbf_s)}, {_steps(steps)} lose the least time"
    return IntervalChoice(interval_steps=steps, bound=IntervalBound.FAILURES, reason=reason)


def durable_bound(rules: CadenceRules, measured: Measured) -> IntervalChoice | None:
    """Return the least steps between saves at which the slowest tier keeps up; None before the first commit."""
    assert measured.step_s is not None
    slowdown = 1.0 + (rules.overhead or 0.0)
    slowest: tuple[int, str] | None = None
    for tier in rules.tiers:
        durable_s = measured.durable_s.get(tier.name)
        if durable_s is None or tier.kind in (TierKind.DEVICE, TierKind.HOST):
            continue
        share_s = durable_s / tier.flush_every
        steps = pccheck_steps(share_s, measured.images, slowdown, measured.step_s)
        if slowest is None or steps > slowest[0]:
            slowest = steps, tier.name
    if slowest is None:
        return None
    steps, name = slowest
    reason = (
        f"tier {name} has a save after {measured.durable_s[name]:.3g} s, and host memory holds {measured.images}: "
        f"it keeps up with one every {_steps(steps)}"
    )
    return IntervalChoice(interval_steps=steps, bound=IntervalBound.DURABLE, reason=reason)


def tier_cadences(
    rules: CadenceRules, measured: Measured, interval_steps: int | None
) -> tuple[TierCadence, ...]:
    """Return for each tier the best interval of flushes, by Daly's formula with the failures that no faster tier
    survives.

    The cost of a flush to one tier is not known: the cost of the whole save, its upper bound, is used.
    """
    if not rules.mtbf_s or measured.cost_s is None or not measured.step_s:
        return ()
    covered = LossClass.NONE
    found = []
    for tier in rules.tiers:
        faced = next((c for c in LOSS_CLASSES if not covered.covers(c)), None)
        if faced is None or not tier.survives.covers(faced):
            reason = "a faster tier survives whatever it survives"
            found.append(_no_cadence(tier.name, reason))
            continue
        covered = tier.survives
        found.append(_cadence_of(tier, faced, rules, measured, interval_steps))
    return tuple(found)


def _no_cadence(tier: str, reason: str) -> TierCadence:
    return TierCadence(tier=tier, mtbf_s=None, interval_s=None, flush_every=None, reason=reason)


def _cadence_of(
    tier: TierRules,
    faced: LossClass,
    rules: CadenceRules,
    measured: Measured,
    interval_steps: int | None,
) -> TierCadence:
    assert measured.cost_s is not None
    assert measured.step_s is not None
    mtbf_s = mtbf_of(rules.mtbf_s, faced)
    best_s = daly_s(measured.cost_s, mtbf_s)
    reason = f"it is for the loss of a {faced}, every {format_duration(mtbf_s)}"
    durable_s = measured.durable_s.get(tier.name, 0.0)
    if durable_s > best_s:
        best_s = durable_s
        reason += f"; it takes a checkpoint in {format_duration(durable_s)}, and no more often"
    between_s = (interval_steps or 1) * measured.step_s
    return TierCadence(
        tier=tier.name,
        mtbf_s=mtbf_s,
        interval_s=best_s,
        flush_every=max(1, round(best_s / between_s)),
        reason=reason,
    )


def mtbf_of(mtbf_s: Mapping[LossClass, float], lost: LossClass) -> float:
    """Return the MTBF of a loss class. If none is configured for it, that of the next less severe class applies;
    without one, that of a more severe class.
    """
    at_most = [c for c in LOSS_CLASSES if c in mtbf_s and lost.covers(c)]
    return mtbf_s[at_most[-1]] if at_most else min(mtbf_s.values())


def _steps(steps: int) -> str:
    return f"{steps} step" + ("s" if steps != 1 else "")


def mean_within(samples: Sequence[float], *, cut: float = 0.1) -> float:
    """Return the trimmed mean: without the share ``cut`` of the samples at either end, so that single long steps do not
    count."""
    if not samples:
        return math.nan
    few = int(len(samples) * cut)
    usual = sorted(samples)[few : len(samples) - few]
    return math.fsum(usual) / len(usual)
