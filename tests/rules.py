"""Rules of retention for tests, as a configuration would give them."""

from __future__ import annotations

from typing import Any

from tierfall.core.policy import PolicyKind, Rule
from tierfall.core.values import Direction
from tierfall.policies.registry import find
from tierfall.policies.retain_rules import Best, Every, Tags


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
    return rule("every", Every(steps=steps))


def every_period(seconds: float) -> Rule:
    return rule("every", Every(period_s=seconds))


def best(metric: str, *, mode: str = "min", count: int = 1) -> Rule:
    return rule("best", Best(metric=metric, mode=Direction(mode), count=count))


def young(seconds: float) -> Rule:
    return rule("for", seconds)


def tagged(*names: str) -> Rule:
    return rule("tags", Tags(names=names))


def order(name: str) -> Rule:
    return rule(name, kind=PolicyKind.EVICT)
