"""Keys of the file that are no section's own: policies that were registered, with what stands behind their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, WithJsonSchema
from pydantic_core import InitErrorDetails, ValidationError

from tierfall.config import plugins
from tierfall.config.fields import show, wrong
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.policy import Policy, PolicyKind, Rule
from tierfall.core.types.text import nearest


def known_keys(section: type[BaseModel]) -> Sequence[str]:
    """Name a section's own keys."""
    return [field.alias or name for name, field in section.model_fields.items()]


def with_registered(
    kind: PolicyKind, value: Mapping[str, Any], known: Sequence[str]
) -> dict[str, Any]:
    """Read what is no key of a section's own by the policies of that name; a key without a value is left out."""
    return {
        key: inner if key in known else registered(kind, key, inner, known)
        for key, inner in value.items()
        if inner is not None
    }


def registered(kind: PolicyKind, name: object, value: object, known: Any) -> Any:
    """Read what stands behind the name of a registered policy, or refuse it with its place."""
    inside: tuple[Any, ...] = (name,)
    policy = None
    try:
        policy = plugins.find(kind, str(name)) if isinstance(name, str) else None
        if policy is not None:
            return plugins.read_rules(policy, value)
        words = dict.fromkeys((*known, *plugins.names_of(kind)))
        near = nearest(str(name), words) or (
            f"; expected one of {', '.join(words)}, or a policy that was registered before (docs/write-a-policy.md)"
        )
        problems = [(inside, f"unknown {'key' if known else 'order'}{near}")]
        expected = "a policy that is registered"
    except ConfigError as error:
        problems, expected = [(inside, str(error))], "a policy whose plug-in can be loaded"
    except ValidationError as error:
        problems = [
            (
                (*inside, *found["loc"]),
                f"{show(found['input'])} does not fit: {_describe(policy, found['msg'])}",
            )
            for found in error.errors(include_url=False, include_context=False)
        ]
        expected = f"what the {kind} policy {name} takes"
    raise ValidationError.from_exception_data(
        kind,
        [
            InitErrorDetails(type=wrong(text, expected=expected), loc=place, input=None)
            for place, text in problems
        ],
        hide_input=True,
    ) from None


def read_order(kind: PolicyKind, value: object) -> dict[str, Any] | None:
    """Read an order: its name, or a mapping of its name to what it is given."""
    if value is None:
        return None
    if isinstance(value, str):
        name, rules = value, None
    elif isinstance(value, Mapping) and len(value) == 1:
        ((name, rules),) = value.items()
    else:
        expected = f"the name of an order such as {' or '.join(plugins.names_of(kind)[:2])}"
        raise wrong(f"{show(value)} does not fit; expected {expected}", expected=expected)
    return {name: registered(kind, name, rules, ())}


def order_rule(kind: PolicyKind, order: Mapping[str, Any] | None) -> Rule | None:
    """Give an order that was read as policies are asked with it; None for the default."""
    for name, rules in (order or {}).items():
        return plugins.rule(kind, name, rules)
    return None


ORDER_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": 1}]}
)


def _describe(policy: Policy | None, message: str) -> str:
    """Word what pydantic found; a policy without settings has no model that could say it."""
    return message if policy and policy.rules else "it takes no settings; expected true"
