"""The registered policies, by kind and name. Built-in ones and a user's own are registered in the same way.

The table of registrations is the only state; no policy is looked up while one decides. Policies that packages provide
as entry points are loaded by ``tierfall.config.plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.text import hint_at, signature_fault, with_article
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
    """Register the decorated function as a policy; a configuration selects it by ``name``.

    ``kind`` is one of interval, retain, evict, flush. The function has three positional arguments: a ``TierView``, or a
    ``Measured`` for an interval; the rules, or None; the time in seconds since 1970. docs/write-a-policy.md describes
    what it returns.

    ``rules`` is the type of the settings in YAML: a pydantic model, or another type that pydantic validates; without
    it the setting is ``true``. ``due`` has the same arguments and returns the time, in seconds since 1970, at which the
    answer may change without an event (None: never); without it, the function is called only after events. ``words``
    formats the rules for reasons. ``alike``: the answer depends only on steps and attempts, so that all ranks have the
    same.

    Raises ConfigError for an invalid kind or name, for a name that another function has, and for a function with other
    arguments.
    """
    if kind not in set(PolicyKind):
        kinds = f"one of {', '.join(PolicyKind)}"
        hint = hint_at(kind, PolicyKind) if isinstance(kind, str) else ""
        raise ConfigError(f"register: {kind!r} is not a kind of policy; expected {kinds}{hint}")
    check_name(name, what=f"register: {kind} policy")
    place = (PolicyKind(kind), name)
    given = "(measured, rules, now_s)" if kind == PolicyKind.INTERVAL else "(tier, rules, now_s)"

    def add(decide: Decide) -> Decide:
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

    return add


def find(kind: PolicyKind, name: str) -> Policy | None:
    """Return the policy that is registered under a name, if one is."""
    return _policies.get((kind, name))


def names_of(kind: PolicyKind) -> tuple[str, ...]:
    """Names of the registered policies of a kind, in the order of their registration."""
    return tuple(name for of, name in _policies if of is kind)


def _origin(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function. A module that is loaded again may register it again."""
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


Order = Sequence[tuple[CheckpointId, str]]


def call_order(
    rule: Rule | None,
    default: Callable[[TierView, None, float], Order],
    *,
    view: View,
    tier: TierRules,
    about: Sequence[CheckpointView],
    omitted: str,
) -> list[tuple[CheckpointView, str]]:
    """Apply an order to checkpoints, which are given oldest first; return each with the reason for its place. Those
    that the order leaves out are last, the oldest first, for the reason ``omitted``."""
    tier_view = TierView(checkpoints=tuple(about), tier=tier, view=view)
    decide, rules = (default, None) if rule is None else (rule.policy.decide, rule.rules)
    reasons = dict(decide(tier_view, rules, view.wall_time_s))
    places = {id: place for place, id in enumerate(reasons)}
    ordered = sorted(about, key=lambda c: (places.get(c.id, len(places)), c.live, c.id))
    return [(checkpoint, reasons.get(checkpoint.id, omitted)) for checkpoint in ordered]
