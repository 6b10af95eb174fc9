"""Policies by name, those of plug-ins included: found, loaded, their settings read, and their failures contained.

A module registers them. The program imports it, or the key ``plugins`` of a configuration names it, or an installed
package has an entry point of the group ``tierfall.policies``, named KIND.NAME, as in ``retain.milestones =
"my_package.policies"``, whose module is imported when a configuration uses that policy. A plug-in's policy that raises,
or returns an invalid answer, never costs a checkpoint.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

from pydantic import BeforeValidator, PydanticUserError, TypeAdapter
from pydantic_core import InitErrorDetails, ValidationError

from tierfall.config.fields import misfit, show
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.text import hint_at
from tierfall.core.types.view import TierView
from tierfall.policies import registry

logger = logging.getLogger("tierfall")

GROUP = "tierfall.policies"
LEAST_S = 1.0
"""The least seconds between two calls of a plug-in's policy that are due by time alone."""


def load_module(entry: str, folder: Path) -> str:
    """Import a module of ``plugins``: a file, or a name, which is that of a file in ``folder`` or can be imported.
    Return the path of the file, or the name. A file that is imported already, or is the program, is not imported again.

    Raises ConfigError if it cannot be imported.
    """
    path = folder / Path(entry).expanduser()
    path = path if path.suffix == ".py" else folder / f"{entry}.py"
    try:
        if path.is_file():
            _import_file(path.resolve())
            return str(path.resolve())
        if not entry.endswith(".py"):
            import_module(entry)
            return entry
    except ModuleNotFoundError as error:
        if error.name != entry.partition(".")[0]:
            raise _import_error(entry, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(entry, error) from error
    raise ConfigError(
        f"there is no module {entry}: expected a file in {folder}, such as {path.name}, or a module that this Python "
        "can import (install its package, or write the path of its file)"
    )


def _import_error(entry: str, error: BaseException) -> ConfigError:
    why = repr(error)
    if isinstance(error, SystemExit):
        why += "; a script is imported here, and must not run: put what it runs below if __name__ == '__main__'"
    return ConfigError(f"the module {entry} cannot be imported: {why}; repair it, or remove it")


def _import_file(path: Path) -> None:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    if path in {Path(file).resolve() for file in files if file}:
        return
    if (other := sys.modules.get(path.stem)) is not None:
        raise ImportError(
            f"another module has the name {path.stem} ({getattr(other, '__file__', 'built in')}): rename the file"
        )
    sys.path.insert(0, str(path.parent))  # it may import files beside it
    try:
        import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


def find(kind: PolicyKind, name: str) -> Policy | None:
    """Return a policy that is registered, or that an installed package provides; None if there is none.

    Raises ConfigError, which names the plug-in, if it cannot be loaded or does not register that policy.
    """
    found = registry.find(kind, name)
    if found is not None:
        return found
    for point in entry_points(group=GROUP, name=f"{kind}.{name}"):
        what = f"{kind} policy {name}"
        plugin = f"{point.value} of {point.dist.name}" if point.dist else point.value
        try:
            point.load()
        except Exception as error:
            raise ConfigError(
                f"{what}: the plug-in {plugin} could not be loaded: {error!r}; repair or uninstall "
                f"it, or remove {what} from the configuration"
            ) from error
        found = registry.find(kind, name)
        if found is None:
            raise ConfigError(
                f"{what}: the plug-in {plugin} was loaded and registers no such policy; "
                f'expected @tierfall.policies.register("{kind}", "{name}") in it'
            )
    return found


def names_of(kind: PolicyKind) -> tuple[str, ...]:
    """Names of all policies of a kind; loads none."""
    parts = (point.name.partition(".") for point in entry_points(group=GROUP))
    provided = (name for of, _, name in parts if of == kind)
    return tuple(dict.fromkeys((*registry.names_of(kind), *provided)))


def rule(kind: PolicyKind, name: str, rules: Any) -> Rule:
    """Bind a policy to its settings. The calls of a plug-in's policy are guarded."""
    policy = find(kind, name)
    if policy is None:
        raise ConfigError(f"{kind} policy {name}: it is not registered in this process")
    if not _is_ours(policy):
        policy = _guarded(policy)
    return Rule(policy=policy, rules=None if policy.rules is None else rules)


# Guards ----------------------------------------------------------------------------------------------


def _is_ours(policy: Policy) -> bool:
    return str(getattr(policy.decide, "__module__", "")).startswith("tierfall.policies.")


def _guarded(policy: Policy) -> Policy:
    """Wrap a plug-in's policy so that a failure is logged once and has a safe answer: a rule of retention keeps
    everything; an order is empty, so that the oldest is first; a cadence has none, and the default decides."""
    logged: set[str] = set()

    def contained(answer: Callable[[], Any], safe: Callable[[str], Any]) -> Any:
        try:
            return answer()
        except Exception as error:
            text = f"the {policy.kind} policy {policy.name} failed: {error!r}"
            if text not in logged:
                logged.add(text)
                logger.error("%s", text, exc_info=error)
            return safe(text)

    @wraps(policy.decide)
    def decide(given: Any, rules: Any, now_s: float) -> Any:
        check, safe = _CHECKS[policy.kind]
        return contained(
            lambda: check(policy.decide(given, rules, now_s), given),
            lambda text: safe(text, given),
        )

    def due(tier: TierView, rules: Any, now_s: float) -> Any:
        def answer() -> float | None:
            when = None if policy.due is None else policy.due(tier, rules, now_s)
            return None if when is None else max(float(when), now_s + LEAST_S)

        return contained(answer, lambda text: None)

    return replace(policy, decide=decide, due=None if policy.due is None else due)


def _check_steps(answer: Any, measured: object) -> tuple[int, str]:
    steps, reason = answer
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"it must return a whole number of steps, 1 or more, not {steps!r}")
    return steps, str(reason)


def _check_kept(answer: Any, tier: TierView) -> dict[Any, str]:
    """Check the answer of a rule of retention: a reason for each id, of ids that it was given."""
    if not isinstance(answer, Mapping):
        raise TypeError(f"it must return a mapping of ids to reasons, not {answer!r}")
    return dict(_check_order(answer.items(), tier))


def _check_order(answer: Any, tier: TierView) -> list[tuple[Any, str]]:
    """Check the answer of an order: pairs of an id that it was given and a reason, each id at most once."""
    pairs = [(id, str(reason)) for id, reason in answer]
    given = {c.id for c in tier.checkpoints}
    if strange := [id for id, _ in pairs if id not in given]:
        raise ValueError(f"it returned {strange[0]!r}, which it was not given")
    counts = Counter(id for id, _ in pairs)
    if twice := [id for id, times in counts.items() if times > 1]:
        raise ValueError(f"it returned {twice[0]} twice")
    return pairs


_CHECKS: Mapping[PolicyKind, tuple[Callable[[Any, Any], Any], Callable[[str, Any], Any]]] = {
    PolicyKind.RETAIN: (
        _check_kept,
        lambda failure, tier: {c.id: f"{failure}: everything is kept" for c in tier.checkpoints},
    ),
    PolicyKind.EVICT: (_check_order, lambda failure, tier: []),
    PolicyKind.FLUSH: (_check_order, lambda failure, tier: []),
    PolicyKind.INTERVAL: (_check_steps, lambda failure, measured: None),
}
"""By kind: what checks an answer, and the safe answer in place of one that failed."""


def read_policies(
    kind: PolicyKind, section: Mapping[Any, Any], known: Collection[str]
) -> dict[str, Any]:
    """Validate a section in which each key that is not ``known`` is the name of a policy: replace its value by its
    settings. A null stands for the default of a known key, and for no policy."""
    read: dict[str, Any] = {}
    for name, value in section.items():
        if name in known:
            read[name] = value
        else:
            read |= _settings(_find_at(kind, name), value)
    return {name: value for name, value in read.items() if value is not None}


def _find_at(kind: PolicyKind, name: Any) -> Policy:
    """Find the policy of a key; raises a ValidationError with the key as its location."""
    line = InitErrorDetails(type="extra_forbidden", loc=(name,), input=None)
    try:
        if isinstance(name, str) and (policy := find(kind, name)):
            return policy
    except ConfigError as error:
        line |= {"type": "value_error", "ctx": {"error": error}}
    raise ValidationError.from_exception_data(kind, [line])


def read_order(kind: PolicyKind, value: object) -> dict[str, Any] | None:
    """Validate an order: its name, or a mapping of its name to its settings."""
    if value is None:
        return None
    if not isinstance(value, str) and not (isinstance(value, Mapping) and len(value) == 1):
        raise misfit(value, f"the name of an order such as {' or '.join(names_of(kind)[:2])}")
    name, settings = (value, True) if isinstance(value, str) else next(iter(value.items()))
    policy = find(kind, str(name))
    if policy is None:
        raise ConfigError(f"unknown order {show(name)}{hint_at_policy(kind, str(name))}")
    return _settings(policy, True if settings is None else settings)


def hint_at_policy(kind: PolicyKind, name: str, others: Collection[str] = ()) -> str:
    """Return a hint at the policy, or at another word, that was probably meant."""
    words = [*others, *(known for known in names_of(kind) if known not in others)]
    return hint_at(name, words) or (
        f"; expected one of {', '.join(words)}, or a policy that a module of 'plugins' registers "
        "(docs/write-a-policy.md)"
    )


def _settings(policy: Policy, value: object) -> dict[str, Any]:
    """Validate the settings of a policy by its own model; ``true`` stands for no settings. Return them by its name,
    which begins the location of an error; None if there are none."""
    if value is None:
        return {policy.name: None}
    form: Any = GenericAlias(dict, (str, policy.rules or _NoSettings))
    try:
        reader: TypeAdapter[dict[str, Any]] = TypeAdapter(form)
    except PydanticUserError as error:
        raise ConfigError(
            f"{policy.kind} policy {policy.name}: it is registered with rules={policy.rules!r}, which pydantic does "
            "not read; expected a pydantic model, or a type such as int"
        ) from error
    return reader.validate_python({policy.name: {} if value is True else value})


def _no_settings(value: object) -> bool:
    if value not in ({}, "true"):
        raise ConfigError(f"{show(value)} does not fit: it has no settings; expected true")
    return True


_NoSettings = Annotated[bool, BeforeValidator(_no_settings)]


def order_rule(kind: PolicyKind, order: Mapping[str, Any] | None) -> Rule | None:
    """Return the rule of a validated order; None for the default order."""
    for name, rules in (order or {}).items():
        return rule(kind, name, rules)
    return None
