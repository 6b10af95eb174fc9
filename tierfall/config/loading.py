"""Turns a file, a dict or a ready model into a ``Config``, or into one error that names everything that is wrong.

The errors are pydantic's. Each is told with its place, what was expected, and the nearest known key; these come from
the model itself (keys, examples). A value that came from the environment may be a secret: messages show the text as
the file has it. The file is safe YAML only: no tag makes an object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierfall.backends.open import refuse_step_path
from tierfall.config.fields import BASE, is_address, show
from tierfall.config.model import (
    TIER_MODELS,
    Config,
    Place,
    Problem,
    Section,
    check_chain,
    expand_tiers,
    fields_of,
)
from tierfall.config.plugins import hint_at_policy
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.policy import PolicyKind
from tierfall.core.types.text import hide_address, hint_at, with_article
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
    values = read.fill(read.value, environ)
    if not isinstance(values, dict):
        colon = (
            '; is a colon missing? "run: r", then "tiers: ./checkpoints"'
            if isinstance(values, str)
            else ""
        )
        raise ConfigError(f"{read.where(())}expected a mapping with at least run and tiers{colon}")
    if run is not None:
        values["run"] = run
    file = None if read.path is None else read.path.absolute()
    config, base = None, None if file is None else file.parent
    try:
        config = Config.model_validate(values, context={BASE: base})
    except ValidationError as error:
        read.note_problems(error, values, base)
    if config is None or read.problems:  # not chained: its details have values of the environment
        raise read.error()
    return config if file is None else config.read_from(file)


def explain(error: ValidationError, values: dict[str, object]) -> ConfigError:
    """Return the error of a ``Config`` that was made of values directly."""
    read = _Source(value=values)
    read.note_problems(error, values, None)
    return read.error()


def _read(source: str | os.PathLike[str] | Mapping[str, object]) -> _Source:
    if isinstance(source, Mapping):
        return _Source(value=source)
    if isinstance(source, str | os.PathLike):
        return _read_yaml(Path(source).expanduser())
    raise ConfigError(
        f"expected the path of a YAML file, a dict or a tierfall.Config, got {type(source).__name__}"
    )


# The file --------------------------------------------------------------------------------------------


_FILE_BYTES_MAX = 128 << 10
_VALUES_MAX = 10_000
_DEPTH_MAX = 100
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}|(\$\{[^}]*\}?)")
_BRACED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


@dataclass(slots=True, kw_only=True)
class _Source:
    """Plain values, and what messages tell of them: the file that they are from, the line of each place, the texts in
    which references were replaced, and what is wrong."""

    value: object = None
    path: Path | None = None
    lines: dict[Place, int] = field(default_factory=dict)
    hidden: dict[Place, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def error(self) -> ConfigError:
        in_order = sorted(self.problems, key=lambda p: _around(p.place, self.lines) or 0)
        lines = [f"{self.where(problem.place)}{problem}" for problem in in_order]
        if len(lines) == 1:
            return ConfigError(lines[0])
        listed = "".join(f"\n  {line}" for line in lines)
        return ConfigError(f"{self.path or 'configuration'}: {len(lines)} problems{listed}")

    def where(self, place: Place) -> str:
        """Return ``FILE:LINE: ``; empty if there is no file."""
        return "" if self.path is None else f"{self.path}:{_around(place, self.lines)}: "

    def original(self, place: Place) -> str | None:
        """Return the text in the file if a reference in it was replaced."""
        return _around(place, self.hidden)

    def note_lines(self, node: yaml.Node, place: Place = ()) -> None:
        """Note the line of every place: of its key in a mapping, of its beginning in a list."""
        self.lines.setdefault(place, node.start_mark.line + 1)
        if len(self.lines) > _VALUES_MAX:
            many = f"more than {_VALUES_MAX} values, those of an alias counted wherever it stands"
            raise _error_at(node, f"{many}; expected a file of a few lines")
        if len(place) > _DEPTH_MAX:
            raise _error_at(node, "a value that contains itself, or is nested too deeply")
        for part, inner, line in _children(node):
            below = (*place, part)
            first, self.lines[below] = self.lines.get(below), line
            if first is None:
                self.note_lines(inner, below)
            else:
                message = f"the key occurs twice here, first on line {first}; remove one"
                self.problems.append(Problem(below, message))

    def note_problems(
        self, error: ValidationError, values: dict[str, object], base: Path | None
    ) -> None:
        """Note what pydantic has found. The model checks the chain only if all else is valid. One message is to name
        all problems, so it is checked here."""
        found, tiers = error.errors(include_url=False), values.get("tiers")
        chain = check_chain(tiers, base) if isinstance(tiers, list) else []
        told = [d for d in found if (d["loc"] or not chain) and not _is_echo(d, found)]
        problems = [*(_problem(details, self) for details in told), *chain]
        wrong_already = {problem.place for problem in self.problems}
        self.problems += [problem for problem in problems if problem.place not in wrong_already]

    def fill(self, value: object, environ: Mapping[str, str], place: Place = ()) -> object:
        """Return a copy of the value in plain dicts and lists, with every reference replaced. The text of a variable is
        not searched for references."""
        match value:
            case str() if "${" in value:
                self.hidden[place] = value
                filled = _REFERENCE.sub(lambda m: self._value_of(m, environ, place), value)
                _hide_address(filled, value)
                return filled
            case Mapping():
                return {k: self.fill(inner, environ, (*place, k)) for k, inner in value.items()}
            case list() | tuple():
                return [self.fill(v, environ, (*place, n)) for n, v in enumerate(value)]
            case _:
                return value

    def _value_of(self, match: re.Match[str], environ: Mapping[str, str], place: Place) -> str:
        name, malformed = match[1], match[2]
        if name and name in environ:
            return environ[name]
        if malformed is None:
            message = f"the environment variable {name} is not set; set it, or write the value"
        else:
            hint = f": write ${{env:{malformed[2:-1]}}}" if _BRACED.fullmatch(malformed) else ""
            message = f"{malformed} is not a reference; expected ${{env:NAME}}{hint}"
        self.problems.append(Problem(place, message))
        return "nothing" if malformed else match[0]  # the field's own check finds no second error


V = TypeVar("V")


def _around(place: Place, values: Mapping[Place, V]) -> V | None:
    """Return the value at a place, or at the nearest one around it that has one."""
    outward = (place[:length] for length in range(len(place), -1, -1))
    return next((values[part] for part in outward if part in values), None)


def _hide_address(filled: str, text: str) -> None:
    """Have messages show the text of the file in place of an address."""
    scheme, colon, rest = filled.partition("://")
    if colon and rest:
        hide_address(filled.rstrip("/"), text)
        if scheme in ("http", "https"):  # of a server, messages name the host alone
            hide_address(rest.partition("/")[0], text)


def _read_yaml(path: Path) -> _Source:
    """Read a configuration file. Raises ConfigError where it cannot be read, or is not YAML."""
    text, source = _read_text(path), _Source(path=path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            source.note_lines(node)  # before the values are made: that resolves merge keys
            source.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}{_format_yaml_error(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if node is None:
        raise ConfigError(f"{path}: the file is empty; expected at least run and tiers")
    return source


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates: no value is one, but the name of a run may look like one."""

    yaml_constructors: ClassVar = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str,
    }


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
            f"{path}: there is no such file{seen_from}; expected the path of a YAML file; 'tierfall init' writes one"
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


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error_at(key, "a key that is a list or a mapping; expected a word")
            yield str(key.value), inner, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield index, inner, inner.start_mark.line + 1


# What pydantic found ---------------------------------------------------------------------------------


_UNKNOWN = ("extra_forbidden", "invalid_key")
_EXPECTED = {
    "string_type": "text",
    "tuple_type": "a list",
    "too_short": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}
"""By the type of an error; of other types, pydantic's message says it."""


def _is_echo(details: ErrorDetails, found: Collection[ErrorDetails]) -> bool:
    """Whether an error tells another one again: a key is missing since a wrong one takes its place, or a list is short
    of the entries that are wrong."""
    location, kind = details["loc"], details["type"]
    if kind == "too_short":
        return any(d is not details and d["loc"][: len(location)] == location for d in found)
    if kind != "missing":
        return False
    key, unknown = str(location[-1]), [d["loc"] for d in found if d["type"] in _UNKNOWN]
    beside = [str(place[-1]) for place in unknown if place[:-1] == location[:-1]]
    return any({key, each} == {"path", "url"} or hint_at(each, [key]) for each in beside)


def _problem(details: ErrorDetails, read: _Source) -> Problem:
    location, kind, value = details["loc"], details["type"], details["input"]
    # Without the kind that pydantic inserts into the location of a tier.
    place = (*location[:2], *location[3:]) if location[:1] == ("tiers",) else location
    if kind.startswith("union_tag") and len(location) == 2:
        location, place = (*location, "kind"), (*place, "kind")
        value = details["ctx"].get("tag")
        kind = "missing" if value is None else kind
    original = read.original(place)
    if kind in _UNKNOWN:
        message = f"unknown key{_hint_at_key(location)}"
    elif kind == "missing":
        message = f"missing; {_expected(location, details, None)}"
    elif original is not None:
        message = f"the value of {original} does not fit; {_expected_by_field(location, details)}"
    elif kind == "value_error":
        message = str(details["ctx"]["error"])
    elif "options" in location:  # it may be a secret
        message = f"this value does not fit; {_expected(location, details, None)}"
    else:
        message = f"{show(value)} does not fit; {_expected(location, details, value)}"
    return Problem(place, message)


def _expected_by_field(location: Place, details: ErrorDetails) -> str:
    """Tell what was expected in place of a secret: what the error of the field tells for a text that nobody meant."""
    info = _field_at(location)
    if details["type"] == "value_error" and info is not None:
        try:
            TypeAdapter(info.rebuild_annotation()).validate_python("x://")
        except ValidationError as error:
            told = str(error.errors()[0].get("ctx", {}).get("error"))
            return f"expected {told.partition('expected ')[2]}"
    return _expected(location, details, None)


def _expected(location: Place, details: ErrorDetails, value: object) -> str:
    """Tell what was expected at a location; beside it, what its ``value`` may have meant (None: it is missing, or a
    secret)."""
    kind, listed = details["type"], str(details.get("ctx", {}).get("expected"))
    of_tier = kind.startswith("union_tag") and len(location) == 3
    words = [*TierKind] if of_tier else re.findall("'([^']+)'", listed)
    if words:
        return f"expected one of {', '.join(words)}{_hint_at_word(location, value, words)}"
    quoted = kind == "string_type" and isinstance(value, int) and not isinstance(value, bool)
    near = f'; put it in quotes: "{value}"' if quoted else ""
    if kind in _EXPECTED or value is None:
        return f"expected {_EXPECTED.get(kind, 'a value')}{_such_as(location, value)}{near}"
    return details["msg"].replace("Input should be", "expected")  # of a policy of the user's


def _such_as(location: Place, value: object) -> str:
    """Return an example, which is made of the given value if it can be."""
    if len(location) == 2 and location[0] == "tiers":
        return f": {_flow(_tier_of(value))}"
    info = _field_at(location)
    if info is None or not info.examples:
        return ""
    example = info.examples[0]
    if isinstance(location[-1], int):
        return f" such as {_flow(example[0])}"
    match example:
        case [str()] if value and isinstance(value, str):
            return f": {_flow([value])}"
        case dict() if isinstance(value, str | int | float) and not isinstance(value, bool):
            key, shown = next(iter(example.items()))
            begins = str(value)[:1]
            if begins.isalnum() and begins.isdigit() is str(shown)[:1].isdigit():
                return f": {_flow({key: value})}"
    return f" such as {_flow(example)}"


def _tier_of(value: object) -> object:
    """Return a tier as an example, made of the text that stands in place of one. An address may contain a secret: its
    example has another address."""
    text = value if isinstance(value, str) and value else "host"
    if text in (TierKind.HOST, TierKind.DEVICE):
        return {"name": text, "kind": text}
    chain = expand_tiers("s3://bucket/prefix" if is_address(text) else text)
    assert isinstance(chain, list)
    return chain[1]


def _flow(value: object) -> str:
    """Write a value in YAML's flow style."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def _sections(section: type[Section], place: Place) -> Iterator[tuple[Place, dict[str, FieldInfo]]]:
    """Yield the keys of a section and of those in it, by their places: ``("tiers", "file", "flush")``."""
    yield place, fields_of(section)
    for key, info in fields_of(section).items():
        found = [info.annotation]
        for annotation in found:
            found += get_args(annotation)
            if isinstance(annotation, type) and issubclass(annotation, Section):
                kind = [k for k, tier in TIER_MODELS.items() if tier is annotation]
                yield from _sections(annotation, (*place, key, *kind))


_KEYS = dict(_sections(Config, ()))


def _field_at(location: Place) -> FieldInfo | None:
    """Return the field at a location of pydantic's, or of the list there; None in the settings of a user's policy."""
    *place, key = (part for part in location if isinstance(part, str))
    return _KEYS.get(tuple(place), {}).get(key)


# What was probably meant -----------------------------------------------------------------------------


_CALLED = {
    TierKind.DEVICE: "gpu cuda hbm vram",
    TierKind.HOST: "ram memory cpu dram shm pinned",
    TierKind.PEER: "peers replica replicas neighbor neighbour nodes remote_memory",
    TierKind.FILE: "disk nvme ssd local folder dir directory posix pfs nfs lustre fs",
    TierKind.OBJECT: "s3 gs gcs az azure abfs minio http https bucket fsspec store",
}
"""What people call each kind of tier."""
_ELSEWHERE = {
    '"retain: {last: N}" of a tier': "keep_last keep_last_n max_to_keep num_to_keep save_total_limit total_limit",
    '"retain: {best: {metric: NAME, count: N}}" of a tier': "keep_best save_top_k",
    '"interval: {every: N}" at the top': "every_n_steps every_n_train_steps save_every save_interval save_steps",
}
"""What stands for the keys of other checkpointing systems."""
_OF_STORES = re.compile("endpoint|key|secret|token|profile|anon|client")
"""In keys that people write beside an address, and that are options of the store."""
_INSTEAD: dict[Place, str] = {
    ("host", "path"): "write folder for the folder of its memory",
    ("file", "url"): "it is a key of an object tier: write kind: object, and no path",
    ("object", "path"): "write an address as url, and a folder as the path of a file tier",
    ("object", "keep_free"): "a store has no disk that tells how much is free: set capacity",
    ("peer", "parity"): "write copies: N in its place, and any N nodes may be lost",
    ("capture", "mode", "auto"): "leave mode out for lazy, the default",
    (
        "object",
        "driver",
        "obstore",
    ): "remove driver: fsspec has gcsfs and adlfs for gs:// and az://",
}
"""What to write in place of a key, or of a word, by the end of its location."""


def _hint_at_word(location: Place, word: object, words: Collection[str]) -> str:
    if not isinstance(word, str):
        return ""
    called = {name: kind for kind, names in _CALLED.items() for name in names.split()}
    if called.get(word.lower()) in words:
        word = called[word.lower()]
    instead = _INSTEAD.get((*location[-2:], word))
    return f"; {instead}" if instead else hint_at(word, words)


def _hint_at_key(location: Place) -> str:
    """Return where a key belongs that its section does not have, or what was probably meant."""
    place, key = tuple(part for part in location[:-1] if isinstance(part, str)), str(location[-1])
    if place not in _KEYS:
        return ""
    of_tier = f" of {with_article(place[1])} tier" if _is_tier(place) else ""
    of_others = (f"did you mean {to}?" for to, keys in _ELSEWHERE.items() if key in keys.split())
    instead = _INSTEAD.get(location[-2:]) or next(of_others, None)
    return of_tier + (f"; {instead}" if instead else _belongs(place, key))


def _is_tier(place: Place) -> bool:
    return place[:1] == ("tiers",) and len(place) == 2


def _belongs(place: tuple[str, ...], key: str) -> str:
    known = _KEYS[place]
    inside = [name for name in known if key in _KEYS.get((*place, name), ())]
    tiers = [with_article(kind) for kind in TierKind if key in _KEYS["tiers", kind]]
    if inside:
        return f"; it belongs under {' or '.join(inside)}"
    if place == ("tiers", "peer") and key in _KEYS["tiers", "file"]:
        return "; peer memory keeps the newest whole checkpoint and the one that arrives, as they are: remove it"
    if tiers and _is_tier(place):
        return f"; it is a key of {' or '.join(tiers)} tier"
    if tiers:
        return "; it is a key of a tier: write it in an entry of the list tiers"
    if place == ("tiers", "object") and _OF_STORES.search(key):
        return "; it belongs under options, such as options: {endpoint_url: ..., key: ...}"
    if key in _KEYS[()]:
        return "; it belongs at the top, beside run and tiers"
    if place[-1:] in (("interval",), ("retain",)):
        return hint_at_policy(PolicyKind(place[-1]), key, known)
    return hint_at(key, known) or f"; expected one of {', '.join(known)}"
