"""Reads a YAML file into plain values, and remembers on which line each of them stands.

Safe YAML only: no tag makes an object. A key that stands twice in one mapping is a problem, since YAML itself would
silently take the last. This module knows nothing of which keys there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import yaml

from tierfall.config.places import Place, Problem
from tierfall.core.types.errors import ConfigError

_FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """What was read: plain values, the line of each place, and what is wrong with the text itself."""

    label: str
    value: object
    lines: Mapping[Place, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def where(self, place: Place) -> str:
        """Say file and line of a place, or of the nearest one around it; empty without a file."""
        if not self.label:
            return ""
        line = self.line(place)
        return f"{self.label}: " if line is None else f"{self.label}:{line}: "

    def line(self, place: Place) -> int | None:
        """Give the line of a place, or of the nearest one around it that has a line."""
        around = (place[:length] for length in range(len(place), -1, -1))
        return next((self.lines[part] for part in around if part in self.lines), None)


def read_yaml(path: Path) -> YamlSource:
    """Read a configuration file. Raises ConfigError where it cannot be read, or is not YAML."""
    return parse_yaml(_read_text(path), label=str(path))


def parse_yaml(text: str, *, label: str) -> YamlSource:
    """Parse the text of a configuration file. Raises ConfigError where it is not YAML."""
    try:
        node, problems, value = _compose(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{label}{_words(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{label}:{line}: not valid YAML: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: cannot be read as YAML: {error}") from error
    if node is None:
        raise ConfigError(f"{label}: the file is empty; expected at least run and tiers")
    return YamlSource(label=label, value=value, lines=dict(_lines(node, ())), problems=problems)


class _Loader(yaml.SafeLoader):
    """Safe YAML, in which a date is text: nothing here is a date, but a run's name may look like one."""

    yaml_constructors: ClassVar = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str,
    }


def _compose(text: str) -> tuple[yaml.Node | None, tuple[Problem, ...], object]:
    """Parse into nodes, look at them, and make values of them (which resolves merge keys in the nodes, too)."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        problems = () if node is None else tuple(_repeated_keys(node, (), ()))
        return node, problems, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: there is no such file (looked from {Path.cwd()}); give the path of a YAML file, or a dict"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; expected a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 1 MiB; expected a YAML file of a few lines")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start})") from error


def _words(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f":{mark.line + 1}:{mark.column + 1}: " if mark else ": "
    context = f" ({error.context})" if error.context else ""
    return f"{place}not valid YAML: {error.problem}{context}"


def _repeated_keys(node: yaml.Node, place: Place, around: tuple[int, ...]) -> Iterator[Problem]:
    """Find keys that stand twice, and refuse what contains itself."""
    if id(node) in around:
        raise yaml.constructor.ConstructorError(
            None, None, "a value that contains itself", node.start_mark
        )
    first: dict[str | int, int] = {}
    for part, inner, line in _inside(node):
        if part in first:
            yield Problem(
                place=(*place, part),
                message=f"the key stands here twice, first on line {first[part]}; remove one",
            )
        first.setdefault(part, line)
        yield from _repeated_keys(inner, (*place, part), (*around, id(node)))


def _lines(node: yaml.Node, place: Place) -> Iterator[tuple[Place, int]]:
    """Give the line of every place: of its key in a mapping, of its beginning in a list."""
    if place == ():
        yield (), node.start_mark.line + 1
    for part, inner, line in _inside(node):
        yield (*place, part), line
        yield from _lines(inner, (*place, part))


def _inside(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            yield str(key.value), inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield index, inner, inner.start_mark.line + 1
