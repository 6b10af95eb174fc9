"""Policies that come from elsewhere: found by name, loaded where a package brings them along, and kept from doing harm.

A package brings a policy along by an entry point of the group ``tierfall.policies``, named by kind and name, as in
``retain.milestones = "my_package.policies"``: what it names is imported when a configuration asks for that policy, and
registers it. A policy of somebody else's that raises, or answers with what is no answer, loses nobody a checkpoint.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import PydanticUserError, TypeAdapter

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.view import TierView
from tierfall.policies import registry

logger = logging.getLogger("tierfall")

GROUP = "tierfall.policies"
LEAST_S = 1.0
"""A policy of somebody else's is asked again by time alone no sooner than after so many seconds."""
_NOTHING: TypeAdapter[bool] = TypeAdapter(Literal[True])


def find(kind: PolicyKind, name: str) -> Policy | None:
    """Return a policy that is registered, or that an installed package brings along; None where neither is.

    Raises ConfigError, which names the plug-in, where that cannot be loaded or does not register what it says.
    """
    found = registry.find(kind, name)
    if found is not None:
        return found
    for point in _entry_points(kind, name):
        _load(point, what=f"{kind} policy {name}")
        found = registry.find(kind, name)
        if found is None:
            raise ConfigError(
                f"{kind} policy {name}: the plug-in {_describe(point)} was loaded and registers none of that name; "
                f'expected @tierfall.policies.register("{kind}", "{name}") in it'
            )
    return found


def names_of(kind: PolicyKind) -> tuple[str, ...]:
    """Name all policies of a kind that there are, without loading any."""
    prefix = f"{kind}."
    brought = (p.name.removeprefix(prefix) for p in _entry_points(kind))
    return tuple(dict.fromkeys((*registry.names_of(kind), *brought)))


def read_rules(policy: Policy, value: object) -> Any:
    """Read what stands behind a policy's name in YAML by its own model; true means that nothing does. Raises pydantic's
    ValidationError, and ConfigError where the policy was registered with what is no type."""
    if policy.rules is None:
        return _NOTHING.validate_python(value in (None, True, "true") or value == {} or value)
    try:
        reader: TypeAdapter[Any] = TypeAdapter(policy.rules)
    except PydanticUserError as error:
        raise ConfigError(
            f"{policy.kind} policy {policy.name}: it is registered with rules={policy.rules!r}, which pydantic does "
            "not read; expected a pydantic model, or a type such as int"
        ) from error
    return reader.validate_python({} if value in (None, True) else value)


def rule(kind: PolicyKind, name: str, rules: Any) -> Rule:
    """Make a rule of a policy that was found before, with rules that were read before."""
    policy = find(kind, name)
    if policy is None:
        raise ConfigError(f"{kind} policy {name}: it is not registered in this process")
    if not _is_ours(policy):
        policy = _guarded_interval(policy) if kind is PolicyKind.INTERVAL else _guarded(policy)
    return Rule(policy=policy, rules=None if policy.rules is None else rules)


def _entry_points(kind: PolicyKind, name: str | None = None) -> Sequence[EntryPoint]:
    prefix = f"{kind}."
    points = [p for p in entry_points(group=GROUP) if p.name.startswith(prefix)]
    return [p for p in points if name is None or p.name == f"{prefix}{name}"]


def _load(point: EntryPoint, *, what: str) -> None:
    try:
        point.load()
    except Exception as error:
        raise ConfigError(
            f"{what}: the plug-in {_describe(point)} could not be loaded: {error!r}; mend or uninstall it, or leave "
            f"{what} out"
        ) from error


def _describe(point: EntryPoint) -> str:
    package = f" of {point.dist.name}" if point.dist is not None else ""
    return f"{point.value}{package}"


# Care ------------------------------------------------------------------------------------------------


def _is_ours(policy: Policy) -> bool:
    return str(getattr(policy.decide, "__module__", "")).startswith("tierfall.policies.")


def _failure_logger(policy: Policy) -> Callable[[Exception], str]:
    """Return what words a policy's failure; each is logged once."""
    said: set[str] = set()

    def failed(error: Exception) -> str:
        text = f"the {policy.kind} policy {policy.name} failed: {error!r}"
        if text not in said:
            said.add(text)
            logger.error("%s", text, exc_info=error)
        return text

    return failed


def _guarded_interval(policy: Policy) -> Policy:
    """Wrap a cadence so that, where it fails, it has no answer."""
    failed = _failure_logger(policy)

    @wraps(policy.decide)
    def decide(measured: Any, rules: Any, now_s: float) -> tuple[int, str] | None:
        try:
            steps, reason = policy.decide(measured, rules, now_s)
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
                raise ValueError(
                    f"it must answer with a whole number of steps, 1 or more, not {steps!r}"
                )
        except Exception as error:  # noqa: BLE001 - it is logged, and the default stands for its answer
            failed(error)
            return None
        return steps, str(reason)

    return replace(policy, decide=decide)


def _guarded(policy: Policy) -> Policy:
    """Wrap a policy so that it harms nothing when it fails: then a rule of retention wants everything, and an order
    says nothing, which leaves the oldest first."""
    failed = _failure_logger(policy)

    @wraps(policy.decide)
    def decide(tier: TierView, rules: Any, now_s: float) -> Any:
        try:
            return _ANSWERS[policy.kind](policy.decide(tier, rules, now_s), tier)
        except Exception as error:  # noqa: BLE001 - it is logged, and what is safe stands for its answer
            text = failed(error)
        if policy.kind is PolicyKind.RETAIN:
            return {c.id: f"{text}: it keeps everything" for c in tier.checkpoints}
        return []

    def due(tier: TierView, rules: Any, now_s: float) -> float | None:
        assert policy.due is not None
        try:
            when = policy.due(tier, rules, now_s)
            return None if when is None else max(float(when), now_s + LEAST_S)
        except Exception as error:  # noqa: BLE001 - as above
            failed(error)
            return None

    return replace(policy, decide=decide, due=None if policy.due is None else due)


def _kept(answer: Any, tier: TierView) -> dict[Any, str]:
    """Check what a rule of retention answers: checkpoints of those that it was asked about, each with a reason."""
    if not isinstance(answer, Mapping):
        raise TypeError(f"it must answer with a mapping of ids to reasons, not {answer!r}")
    asked = {c.id for c in tier.checkpoints}
    if strange := [id for id in answer if id not in asked]:
        raise ValueError(f"it speaks of {strange[0]!r}, which it was not asked about")
    return {id: str(reason) for id, reason in answer.items()}


def _ordered(answer: Any, tier: TierView) -> list[tuple[Any, str]]:
    """Check what an order answers: pairs of a checkpoint of those that it was asked about and a reason, each once."""
    pairs = [(id, str(reason)) for id, reason in answer]
    asked = {c.id for c in tier.checkpoints}
    if strange := [id for id, _ in pairs if id not in asked]:
        raise ValueError(f"it speaks of {strange[0]!r}, which it was not asked about")
    said = Counter(id for id, _ in pairs)
    if twice := [id for id, times in said.items() if times > 1]:
        raise ValueError(f"it speaks of {twice[0]} twice")
    return pairs


_ANSWERS: Mapping[PolicyKind, Callable[[Any, TierView], Any]] = {
    PolicyKind.RETAIN: _kept,
    PolicyKind.EVICT: _ordered,
    PolicyKind.FLUSH: _ordered,
}
