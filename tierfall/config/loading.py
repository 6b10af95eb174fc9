"""Turns a file, a dict or a ready model into a ``Config``, or into one error that names everything that is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from tierfall.config.environment import EnvironmentFill
from tierfall.config.model import CHAIN, Config
from tierfall.config.places import Problem, write_place
from tierfall.config.rules import check_chain, link_of
from tierfall.config.source import YamlSource, read_yaml
from tierfall.config.wording import problems_of
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    run: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Read a configuration from the path of a YAML file, from a dict of the same shape, or take a ready one.

    ``run`` stands for the run's name, whatever the source says. ``${env:NAME}`` in text is filled in from ``environ``;
    its value appears in no message. Relative paths start at the working directory.

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
        raise ConfigError(f"{read.where(())}expected a mapping with at least run and tiers")
    if run is not None:
        values["run"] = run
    config, found = _validate(values, filling)
    unfilled = {problem.place for problem in filling.problems}
    problems = [*read.problems, *filling.problems, *(p for p in found if p.place not in unfilled)]
    if config is None or problems:
        raise _error(read, problems)
    return config


def _read(source: str | os.PathLike[str] | Mapping[str, object]) -> YamlSource:
    if isinstance(source, Mapping):
        return YamlSource(label="", value=source)
    if isinstance(source, str | os.PathLike):
        return read_yaml(Path(source).expanduser())
    raise ConfigError(
        f"expected the path of a YAML file, a dict or a tierfall.Config, got {type(source).__name__}"
    )


def _validate(
    values: dict[str, object], filling: EnvironmentFill
) -> tuple[Config | None, list[Problem]]:
    """Validate; the error is not kept as a context, since its details hold what the environment gave."""
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        problems = list(problems_of(error, filling))
        asked = any(details["type"] == CHAIN for details in error.errors(include_url=False))
    # pydantic asks about the chain only where all else is right; everything is to be said at once.
    tiers = values.get("tiers")
    if not asked and isinstance(tiers, list):
        problems += check_chain([link_of(tier) for tier in tiers])
    return None, problems


def _error(read: YamlSource, problems: list[Problem]) -> ConfigError:
    in_order = sorted(problems, key=lambda problem: read.line(problem.place) or 0)
    lines = [f"{read.where(problem.place)}{_at(problem)}" for problem in in_order]
    if len(lines) == 1:
        return ConfigError(lines[0])
    listed = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{read.label or 'configuration'}: {len(lines)} problems{listed}")


def _at(problem: Problem) -> str:
    place = write_place(problem.place)
    return f"{place}: {problem.message}" if place else problem.message
