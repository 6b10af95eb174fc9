"""Keys of the file that are no section's own: policies that were registered, with what stands behind their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import InitErrorDetails, ValidationError

from tierfall import plugins
from tierfall.config.fields import nearest, show, wrong
from tierfall.core.errors import ConfigError
from tierfall.core.policy import Policy, PolicyKind


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
                f"{show(found['input'])} does not fit: {_said(policy, found['msg'])}",
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


def _said(policy: Policy | None, message: str) -> str:
    """Word what pydantic found; a policy without settings has no model that could say it."""
    return message if policy and policy.rules else "it takes no settings; expected true"
