"""Turns a file, a dict or a ready model into a ``Config``, or into one error that names everything that is wrong.

An error gives the place, what was expected, and the nearest known key; these come from the model itself (keys,
examples). A value that came from the environment is never shown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tierfall.config.chain import check_chain, link_of
from tierfall.config.fields import BASE, WRONG, show
from tierfall.config.hints import example, example_of, hint_key, hint_kind
from tierfall.config.model import CHAIN, Config
from tierfall.config.source import (
    EnvironmentFill,
    Place,
    Problem,
    YamlSource,
    read_yaml,
    write_place,
)
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.text import hint_at
from tierfall.core.types.values import TierKind


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    run: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration in a YAML file, in a dict of the same shape, or in a ``Config``.

    ``run`` overrides the name of the run. ``${env:NAME}`` in text is replaced from ``environ``; its value appears in no
    message of this call. Relative paths in a file start at the file's folder, others at the working directory.

    Raises ConfigError; the message names every problem, each with file, line and place.
    """
    if run is not None:
        check_name(run, what="run")
    if isinstance(source, Config):
        return source if run is None else source.model_copy(update={"run": run})
    read = _read(source)
    filling = EnvironmentFill(environ)
    values = filling.fill(read.value)
    if not isinstance(values, dict):
        colon = (
            '; is a colon missing? "run: r", then "tiers: ./checkpoints"'
            if isinstance(values, str)
            else ""
        )
        raise ConfigError(f"{read.where(())}expected a mapping with at least run and tiers{colon}")
    if run is not None:
        values["run"] = run
    config, found = _validate(values, filling, read.folder)
    unfilled = {problem.place for problem in filling.problems}
    problems = [*read.problems, *filling.problems, *(p for p in found if p.place not in unfilled)]
    if config is None or problems:
        raise _config_error(read, problems)
    return config if read.folder is None else config.read_from(read.folder / Path(read.label).name)


def _read(source: str | os.PathLike[str] | Mapping[str, object]) -> YamlSource:
    if isinstance(source, Mapping):
        return YamlSource(label="", value=source)
    if isinstance(source, str | os.PathLike):
        return read_yaml(Path(source).expanduser())
    raise ConfigError(
        f"expected the path of a YAML file, a dict or a tierfall.Config, got {type(source).__name__}"
    )


def _validate(
    values: dict[str, object], filling: EnvironmentFill, base: Path | None
) -> tuple[Config | None, list[Problem]]:
    """Validate the values. The error is not chained: its details contain values from the environment."""
    try:
        return Config.model_validate(values, context={BASE: base}), []
    except ValidationError as error:
        problems = list(problems_of(error, filling))
        chain_checked = any(d["type"] == CHAIN for d in error.errors(include_url=False))
    # pydantic checks the chain only if all else is valid; one message is to name all problems
    tiers = values.get("tiers")
    if not chain_checked and isinstance(tiers, list):
        problems += check_chain([link_of(tier, base) for tier in tiers])
    return None, problems


def _config_error(source: YamlSource, problems: list[Problem]) -> ConfigError:
    in_order = sorted(problems, key=lambda problem: source.line(problem.place) or 0)
    lines = [f"{source.where(problem.place)}{_format_problem(problem)}" for problem in in_order]
    if len(lines) == 1:
        return ConfigError(lines[0])
    listed = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{source.label or 'configuration'}: {len(lines)} problems{listed}")


def _format_problem(problem: Problem) -> str:
    place = write_place(problem.place)
    return f"{place}: {problem.message}" if place else problem.message


_UNKNOWN = ("extra_forbidden", "invalid_key")
_EXPECTED = {
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}


def problems_of(error: ValidationError, filling: EnvironmentFill) -> Iterator[Problem]:
    """Describe every error of a validation. A key that is missing where its place is taken by a wrong one is that
    mistake again, and left out."""
    found = error.errors(include_url=False)
    unknown = {details["loc"] for details in found if details["type"] in _UNKNOWN}
    for details in found:
        if details["type"] == CHAIN:
            yield from details["ctx"]["findings"]
        elif details["type"] != "missing" or not _stands_for(details["loc"], unknown):
            yield _problem(details, filling)


def _stands_for(missing: Place, unknown: Collection[Place]) -> bool:
    beside = [str(place[-1]) for place in unknown if place[:-1] == missing[:-1]]
    key = str(missing[-1])
    return any({key, other} == {"path", "url"} or hint_at(other, [key]) for other in beside)


def _problem(details: ErrorDetails, filling: EnvironmentFill) -> Problem:
    location, kind, context = details["loc"], details["type"], details.get("ctx", {})
    place = _without_tag(location)
    original = filling.original(place)
    if kind == WRONG and original is None:
        return Problem(place=place, message=context["message"])
    if kind in _UNKNOWN:
        return Problem(place=place, message=hint_key(location))
    if kind == "missing":
        return Problem(place=place, message=f"missing; expected a value{example(location)}")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_kind((*place, "kind"), context.get("tag"), filling)
    shown = example_of(location, details["input"]) if original is None else example(location)
    expected = context.get("expected") or f"{_EXPECTED.get(kind, 'a value')}{shown}"
    return Problem(
        place=place,
        message=f"{_describe_value(details['input'], original)} does not fit; expected {expected}",
    )


def _describe_value(value: object, original: str | None) -> str:
    return show(value) if original is None else f"the value of {original}"


def _wrong_kind(place: Place, tag: object, filling: EnvironmentFill) -> Problem:
    expected = f"expected one of {', '.join(TierKind)}"
    if tag is None:
        return Problem(place=place, message=f"missing; {expected}")
    original = filling.original(place)
    near = hint_kind(str(tag)) if original is None else ""
    return Problem(
        place=place, message=f"{_describe_value(tag, original)} does not fit; {expected}{near}"
    )


def _without_tag(location: Place) -> Place:
    """Remove the kind that pydantic inserts into the location of a field of a tier."""
    return (*location[:2], *location[3:]) if location[:1] == ("tiers",) else location
