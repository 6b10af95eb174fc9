"""Rules of retention for tests, as a configuration would give them."""

from __future__ import annotations

from typing import Any

from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.values import CheckpointId, Direction
from tierfall.core.types.view import TierView
from tierfall.policies.registry import find
from tierfall.policies.retention import BestRule, EveryRule, TagsRule


def rule(name: str, rules: Any = None, *, kind: PolicyKind = PolicyKind.RETAIN) -> Rule:
    policy = find(kind, name)
    assert policy is not None, f"no {kind} policy is named {name}"
    return Rule(policy=policy, rules=rules)


def last(count: int) -> Rule:
    return rule("last", count)


def retained(count: int | None) -> tuple[Rule, ...]:
    """``retain: {last: count}``, or no rule."""
    return () if count is None else (last(count),)


def every_steps(steps: int) -> Rule:
    return rule("every", EveryRule(steps=steps))


def every_period(seconds: float) -> Rule:
    return rule("every", EveryRule(period_s=seconds))


def best(metric: str, *, mode: str = "min", count: int = 1) -> Rule:
    return rule("best", BestRule(metric=metric, mode=Direction(mode), count=count))


def young(seconds: float) -> Rule:
    return rule("for", seconds)


def tagged(*names: str) -> Rule:
    return rule("tags", TagsRule(names=names))


def order(name: str) -> Rule:
    return rule(name, kind=PolicyKind.EVICT)


NEWEST_FIRST = rule("newest_first", kind=PolicyKind.FLUSH)


def _scattered(tier: TierView, rules: None, now_s: float) -> list[tuple[CheckpointId, str]]:
    by_remainder = sorted(tier.checkpoints, key=lambda c: c.id.step * 5 % 7)
    return [(c.id, f"5 * {c.id.step} mod 7") for c in by_remainder[:-1]]


SCATTERED = Rule(policy=Policy(kind=PolicyKind.FLUSH, name="scattered", decide=_scattered))
"""An order of flush as a user may write one: neither by age, nor does it speak of all."""
