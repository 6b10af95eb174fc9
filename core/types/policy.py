"""What a policy is to the rest: a named function with rules of its own, and a rule, which is such a policy asked of one
tier. Which policies there are stands in ``policies.registry``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PolicyKind(StrEnum):
    """What a policy decides: when to save, what a tier keeps, what it gives up first, what goes there first."""

    INTERVAL = "interval"
    RETAIN = "retain"
    EVICT = "evict"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy, under the name by which a configuration asks for it.

    ``decide`` is a pure function (view, rules, now) -> answer; ``rules`` is the pydantic model, or another type that
    pydantic reads, of what stands behind the name in YAML (None: nothing does). ``due`` says, for the same arguments,
    at which wall time in seconds the answer may change by time alone (None: never), ``words`` says rules in words.
    ``alike``: the answer hangs on steps and attempts alone, so that every rank comes to the same.
    """

    kind: PolicyKind
    name: str
    decide: Callable[..., Any] = field(repr=False)
    rules: Any = field(default=None, repr=False)
    due: Callable[..., float | None] | None = field(default=None, repr=False)
    words: Callable[[Any], str] | None = field(default=None, repr=False)
    alike: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A policy that a tier's configuration asks for, with the rules that it gives, read already."""

    policy: Policy
    rules: Any = None

    def __str__(self) -> str:
        words = self.policy.words
        return self.policy.name if words is None else words(self.rules)
