"""Words pydantic's errors for the people who write the file: the place, what was expected, and the nearest right key.

It reads what is expected from the model itself (keys, examples), and never shows a value that came from the
environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierfall.config.environment import EnvironmentFill
from tierfall.config.fields import WRONG, show
from tierfall.config.model import CHAIN, TIER_MODELS, Config
from tierfall.config.places import Place, Problem
from tierfall.core.types.text import nearest, with_article
from tierfall.core.types.values import TierKind

_EXPECTED = {
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}


def problems_of(error: ValidationError, filling: EnvironmentFill) -> Iterator[Problem]:
    """Word every error of a validation."""
    for details in error.errors(include_url=False):
        if details["type"] == CHAIN:
            yield from details["ctx"]["findings"]
        else:
            yield _problem(details, filling)


def _problem(details: ErrorDetails, filling: EnvironmentFill) -> Problem:
    location, kind, context = details["loc"], details["type"], details.get("ctx", {})
    place = _without_tag(location)
    original = filling.original(place)
    if kind == WRONG and original is None:
        return Problem(place=place, message=context["message"])
    if kind in ("extra_forbidden", "invalid_key"):
        return Problem(place=place, message=_unknown_key(location))
    if kind == "missing":
        return Problem(place=place, message=f"missing; expected a value{_such_as(location)}")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_kind((*place, "kind"), context.get("tag"), filling)
    expected = context.get("expected") or f"{_EXPECTED.get(kind, 'a value')}{_such_as(location)}"
    return Problem(
        place=place, message=f"{_got(details['input'], original)} does not fit; expected {expected}"
    )


def _got(value: object, original: str | None) -> str:
    return show(value) if original is None else f"the value of {original}"


def _wrong_kind(place: Place, tag: object, filling: EnvironmentFill) -> Problem:
    expected = f"expected one of {', '.join(TierKind)}"
    if tag is None:
        return Problem(place=place, message=f"missing; {expected}")
    original = filling.original(place)
    near = nearest(str(tag), TierKind) if original is None else ""
    return Problem(place=place, message=f"{_got(tag, original)} does not fit; {expected}{near}")


def _unknown_key(location: Place) -> str:
    model, key = _model_at(location[:-1]), location[-1]
    known = list(_fields(model))
    near = nearest(str(key), known) or f"; expected one of {', '.join(known)}"
    kind = (
        f" of {with_article(str(location[2]))} tier"
        if len(location) == 4 and location[0] == "tiers"
        else ""
    )
    return f"unknown key{kind}{near}"


def _such_as(location: Place) -> str:
    """Say an example of what belongs at a place, where the model has one."""
    field = _fields(_model_at(location[:-1])).get(str(location[-1])) if location else None
    if field is None or not field.examples:
        return ""
    return f" such as {_flow(field.examples[0])}"


def _flow(value: object) -> str:
    """Write a value in YAML's flow style."""
    match value:
        case bool():
            return show(value)
        case dict():
            return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(_flow(inner) for inner in value) + "]"
        case _:
            return str(value)


def _without_tag(location: Place) -> Place:
    """Drop the kind that pydantic puts into the place of what stands inside a tier."""
    return (*location[:2], *location[3:]) if location[:1] == ("tiers",) else location


def _model_at(location: Place) -> type[BaseModel]:
    """Find the section that a location of pydantic's leads to."""
    model: type[BaseModel] = Config
    if location[:1] == ("tiers",) and len(location) > 2:
        model, location = TIER_MODELS[str(location[2])], location[3:]
    for part in location:
        field = _fields(model).get(str(part))
        model = (_section_in(field.annotation) if field else None) or model
    return model


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Give a section's fields by their keys in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in get_args(annotation))
    return next((section for section in found if section is not None), None)
