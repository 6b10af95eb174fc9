"""Reads a YAML file into plain values with their line numbers, and replaces ``${env:NAME}`` in their text.

Safe YAML only: no tag makes an object. A key that occurs twice in one mapping is a problem, since YAML itself would
silently use the last. A place is the path from the top to a value, ``("tiers", 2, "flush", "every")``, and is written
``tiers[2].flush.every``. What a variable holds may be a secret: messages show the text as the file has it. This module
does not know which keys exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import yaml

from tierfall.backends.open import refuse_step_path
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hide_address

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error in a configuration."""

    place: Place
    message: str


def write_place(place: Place) -> str:
    """Write a place as in ``tiers[2].flush.every``; empty for the whole configuration."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


_FILE_BYTES_MAX = 128 << 10
_VALUES_MAX = 10_000
_DEPTH_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """Plain values, the line of each place, the errors of the text itself, and the folder of the file."""

    label: str
    value: object
    lines: Mapping[Place, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    folder: Path | None = None

    def where(self, place: Place) -> str:
        """Return ``FILE:LINE: `` of a place, or of the nearest one around it; empty if there is no file."""
        if not self.label:
            return ""
        line = self.line(place)
        return f"{self.label}: " if line is None else f"{self.label}:{line}: "

    def line(self, place: Place) -> int | None:
        """Return the line of a place, or of the nearest one around it that has one."""
        outward = (place[:length] for length in range(len(place), -1, -1))
        return next((self.lines[part] for part in outward if part in self.lines), None)


def read_yaml(path: Path) -> YamlSource:
    """Read a configuration file. Raises ConfigError where it cannot be read, or is not YAML."""
    return parse_yaml(_read_text(path), label=str(path), folder=path.absolute().parent)


def parse_yaml(text: str, *, label: str, folder: Path | None = None) -> YamlSource:
    """Parse the text of a configuration file. Raises ConfigError where it is not YAML."""
    try:
        node, problems, value = _compose(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{label}{_format_yaml_error(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{label}:{line}: not valid YAML: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: cannot be read as YAML: {error}") from error
    if node is None:
        raise ConfigError(f"{label}: the file is empty; expected at least run and tiers")
    return YamlSource(
        label=label, value=value, lines=dict(_lines(node)), problems=problems, folder=folder
    )


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates: no value is one, but the name of a run may look like one."""

    yaml_constructors: ClassVar = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str,
    }


def _compose(text: str) -> tuple[yaml.Node | None, tuple[Problem, ...], object]:
    """Parse into nodes, check these, and construct values. Constructing also resolves merge keys in the nodes, so that
    the check comes first."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None and sum(1 for _ in islice(_lines(node), _VALUES_MAX)) == _VALUES_MAX:
            many = f"more than {_VALUES_MAX} values, those of an alias counted wherever it stands"
            raise _error_at(node, f"{many}; expected a file of a few lines")
        problems = () if node is None else tuple(_repeated_keys(node, ()))
        return node, problems, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _read_text(path: Path) -> str:
    refuse_step_path(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        if ":/" in str(path):
            address = str(path).replace(":/", "://", 1)  # a Path has one "/"
            raise ConfigError(
                f"{address} is an address; expected the path of a YAML file, or a dict such as {{'run': 'r', 'tiers': "
                "'s3://bucket/prefix'}"
            ) from error
        seen_from = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise ConfigError(
            f"{path}: there is no such file{seen_from}; expected the path of a YAML file, or a dict"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; expected a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 128 KiB; expected a YAML file of a few lines")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start})") from error


def _format_yaml_error(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f":{mark.line + 1}:{mark.column + 1}: " if mark else ": "
    context = f" ({error.context})" if error.context else ""
    if error.problem and "'\\t'" in error.problem:
        return f"{place}a tab; YAML is indented with spaces"
    begun = error.context_mark
    if (
        begun is not None
        and error.problem_mark is not None
        and begun.line < error.problem_mark.line
    ):
        context = (
            context.removesuffix(")") + f" that begins at {begun.line + 1}:{begun.column + 1})"
        )
    return f"{place}not valid YAML: {error.problem}{context}"


def _error_at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _repeated_keys(node: yaml.Node, place: Place) -> Iterator[Problem]:
    """Find keys that occur twice."""
    first: dict[str | int, int] = {}
    for part, inner, line in _children(node):
        if part in first:
            yield Problem(
                place=(*place, part),
                message=f"the key occurs twice here, first on line {first[part]}; remove one",
            )
        first.setdefault(part, line)
        yield from _repeated_keys(inner, (*place, part))


def _lines(node: yaml.Node, place: Place = ()) -> Iterator[tuple[Place, int]]:
    """Yield the line of every place: of its key in a mapping, of its beginning in a list."""
    if place == ():
        yield (), node.start_mark.line + 1
    if len(place) > _DEPTH_MAX:
        raise _error_at(node, "a value that contains itself, or is nested too deeply")
    for part, inner, line in _children(node):
        yield (*place, part), line
        yield from _lines(inner, (*place, part))


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error_at(key, "a key that is a list or a mapping; expected a word")
            yield str(key.value), inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield index, inner, inner.start_mark.line + 1


_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}|(\$\{[^}]*\}?)")
_BRACED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


@dataclass(slots=True)
class EnvironmentFill:
    """Replaces references, and records the original texts (``hidden``) and the errors."""

    environ: Mapping[str, str]
    hidden: dict[Place, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def fill(self, value: object, place: Place = ()) -> object:
        """Return a copy of the value in plain dicts and lists, with every reference replaced. The text of a variable is
        not searched for references."""
        match value:
            case str():
                return self._fill_text(value, place)
            case Mapping():
                return {key: self.fill(inner, (*place, key)) for key, inner in value.items()}
            case list() | tuple():
                return [self.fill(inner, (*place, index)) for index, inner in enumerate(value)]
            case _:
                return value

    def original(self, place: Place) -> str | None:
        """Return the text at a place, or at one around it, as it was before a variable replaced a reference in it."""
        outward = (place[:length] for length in range(len(place), -1, -1))
        return next((self.hidden[part] for part in outward if part in self.hidden), None)

    def _fill_text(self, text: str, place: Place) -> str:
        if "${" not in text:
            return text
        self.hidden[place] = text
        filled = _REFERENCE.sub(lambda match: self._value_of(match, place), text)
        scheme, colon, rest = filled.partition("://")
        if colon and rest:
            hide_address(filled.rstrip("/"), text)
            if scheme in ("http", "https"):  # of a server, messages name the host alone
                hide_address(rest.partition("/")[0], text)
        return filled

    def _value_of(self, match: re.Match[str], place: Place) -> str:
        name, malformed = match[1], match[2]
        if malformed is not None:
            hint = f": write ${{env:{malformed[2:-1]}}}" if _BRACED.fullmatch(malformed) else ""
            self._add_problem(
                place, f"{malformed} is not a reference; expected ${{env:NAME}}{hint}"
            )
            return "nothing"  # still text: the field's own check reports no second error
        if name not in self.environ:
            self._add_problem(
                place, f"the environment variable {name} is not set; set it, or write the value"
            )
            return match[0]
        return self.environ[name]

    def _add_problem(self, place: Place, message: str) -> None:
        self.problems.append(Problem(place=place, message=message))
