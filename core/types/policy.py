"""A policy (a named function) and a rule (a policy with the settings that a configuration gives it). The registry of
policies is ``policies.registry``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PolicyKind(StrEnum):
    """What a policy decides: the steps from save to save, what a tier retains, the eviction order, the flush order."""

    INTERVAL = "interval"
    RETAIN = "retain"
    EVICT = "evict"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy, under its name in a configuration.

    ``decide`` is a pure function (view, rules, now) -> answer. ``rules`` is the type of the YAML value of that name: a
    pydantic model, or another type that pydantic validates (None: no value). ``due`` returns, for the same arguments,
    the wall time in seconds at which the answer may change by time alone (None: never). ``words`` formats rules for
    people. ``alike``: the answer depends on steps and attempts alone, so that all ranks get the same one.
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
    """A policy in a tier's configuration, with its validated settings."""

    policy: Policy
    rules: Any = None

    def __str__(self) -> str:
        if self.policy.words is not None:
            return self.policy.words(self.rules)
        return self.policy.name if self.rules is None else f"{self.policy.name}: {self.rules}"
