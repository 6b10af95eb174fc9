"""The policies that there are, by kind and name: the built-in ones and a user's own are registered in the same way.

A registration is the one thing here that is remembered; nothing is looked up while a policy decides. What packages
bring along as entry points is loaded by ``tierfall.config.plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.text import nearest, signature_fault, with_article
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import CheckpointView, TierRules, TierView, View

Decide = TypeVar("Decide", bound=Callable[..., Any])

_policies: dict[tuple[PolicyKind, str], Policy] = {}


def register(
    kind: str,
    name: str,
    *,
    rules: Any = None,
    due: Callable[..., float | None] | None = None,
    words: Callable[[Any], str] | None = None,
    alike: bool = False,
) -> Callable[[Decide], Decide]:
    """Register the function below as a policy, which a configuration then asks for by ``name``.

    ``kind`` is one of interval, retain, evict, flush. The function takes three arguments by place: a ``TierView``, or a
    ``Measured`` for an interval; the rules, or None; the time in seconds since 1970. What it answers stands in
    docs/write-a-policy.md.

    ``rules`` is the pydantic model, or another type that pydantic reads, of what stands behind the name in YAML;
    without it, ``true`` does. ``due`` takes the same arguments and returns the time, in seconds since 1970, at which
    the answer may change though nothing happens (None: never); without it, the function is asked when something
    happens. ``words`` takes the rules and returns them as a text for reasons. ``alike`` says that the answer depends on
    steps and attempts alone, so that every rank comes to the same.

    Raises ConfigError for a kind or a name that is none, for a name that another function has, and for a function that
    does not take these arguments.
    """
    if kind not in set(PolicyKind):
        hint = nearest(kind, PolicyKind) if isinstance(kind, str) else ""
        raise ConfigError(f"register: {kind!r} is no kind of policy; expected {_kinds()}{hint}")
    check_name(name, what=f"register: {kind} policy")
    place = (PolicyKind(kind), name)
    given = "(measured, rules, now_s)" if kind == PolicyKind.INTERVAL else "(tier, rules, now_s)"

    def remember(decide: Decide) -> Decide:
        for function, expected in ((decide, given), (due, given), (words, "(rules)")):
            if function is not None and (fault := signature_fault(function, expected)):
                raise ConfigError(f"register: {kind} policy {name!r}: {_origin(function)}: {fault}")
        known = _policies.get(place)
        if known is not None and _origin(known.decide) != _origin(decide):
            raise ConfigError(
                f"register: there is {with_article(kind)} policy named {name!r} already, {_origin(known.decide)}; "
                "choose another name"
            )
        _policies[place] = Policy(
            kind=PolicyKind(kind),
            name=name,
            decide=decide,
            rules=rules,
            due=due,
            words=words,
            alike=alike,
        )
        return decide

    return remember


def find(kind: PolicyKind, name: str) -> Policy | None:
    """Return the policy that is registered under a name, if one is."""
    return _policies.get((kind, name))


def names_of(kind: PolicyKind) -> tuple[str, ...]:
    """Name the policies of a kind that are registered, in the order in which they were."""
    return tuple(name for of, name in _policies if of is kind)


def _kinds() -> str:
    return f"one of {', '.join(PolicyKind)}"


def _origin(function: Callable[..., Any]) -> str:
    """Say where a function is from: a module that is loaded anew may register again."""
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


Order = Sequence[tuple[CheckpointId, str]]


def ask_order(
    rule: Rule | None,
    default: Callable[[TierView, None, float], Order],
    *,
    view: View,
    tier: TierRules,
    about: Sequence[CheckpointView],
) -> dict[CheckpointId, str]:
    """Return the reason of each checkpoint that the order speaks of, in its order; they are given oldest first."""
    asked = TierView(checkpoints=tuple(about), tier=tier, view=view)
    if rule is None:
        return dict(default(asked, None, view.wall_time_s))
    return dict(rule.policy.decide(asked, rule.rules, view.wall_time_s))
