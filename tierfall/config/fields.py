"""The types of values in the configuration: how each is parsed, and its JSON schema.

A parser accepts what YAML yields (text, numbers, true or false) and raises pydantic's custom errors. ``expected`` of an
error never contains the value, so that it can be shown where the value is a secret. This module knows neither keys nor
files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from tierfall.backends.open import check_url
from tierfall.core.compression.codec import LEVEL_MAX
from tierfall.core.format.records import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from tierfall.core.types import keys, units
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hint_at

WRONG = "wrong_value"
BASE = "base"
"""The key of pydantic's context with the folder that relative paths start at; absent: the working directory."""

_NAME_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 200}
_EXPECTED_NAME = "at most 200 letters, digits, '.', '_' and '-', beginning with a letter or digit"
_EXPECTED_INTERFACE = "the name of a network interface such as ib0, or a subnet such as 10.1.0.0/16"
_EXPECTED_URL = "an address such as s3://bucket/prefix, gs://, az:// or file:///folder"
_EXPECTED_CHUNK = "a multiple of 4KiB from 4KiB to 1GiB"
_EXPECTED_FOLDER = "a folder such as ./checkpoints, with ${env:NAME} for a variable"
_EXPECTED_OVERHEAD = "more than 0% and less than 100%, such as 3.5%"
_EXPECTED_BANDWIDTH = f"{units.EXPECTED_RATE}, or a share such as 50%"
_EXPECTED_WAIT = "a time above 0, such as 250ms, 60s, 10m or 4h"
_EXPECTED_LISTEN = "a port from 1 to 65535, or an address and a port such as 127.0.0.1:9109"
PORT_MAX = 65535
_EXPECTED_EVERY = "a whole number of training steps, 1 or more, or a time such as 10m"

_STEPS = re.compile(r"([0-9]+) ?(?:steps?|it|iters?|iterations?)")
_TIME = re.compile(rf"{units.NUMBER_PATTERN} ?(?!e[0-9])[a-z]", re.IGNORECASE)
_INTERFACE = re.compile(r"[A-Za-z][^\s/:]{0,14}")
"""As Linux allows it: 15 characters at most, without a slash or a colon."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def value_error(message: str, *, expected: str) -> PydanticCustomError:
    """Return the error for a wrong value. The texts are context, as pydantic interprets braces in a template."""
    return PydanticCustomError(WRONG, "{message}", {"message": message, "expected": expected})


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def show(value: object) -> str:
    """Format a value for an error message as in YAML, 60 characters at most."""
    match value:
        case None:
            return "an empty value"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"' if len(value) <= 60 else f'"{value[:60]}..."'
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case int() | float():
            return f"{value!r}"[:60]
        case _:
            return f"a value of type {type(value).__name__}"


def misfit(value: object, expected: str, near: str = "") -> ConfigError:
    """Return the error for a value that does not fit."""
    return ConfigError(f"{show(value)} does not fit; expected {expected}{near}")


def parsed(parse: Callable[..., Any], expected: str, *, in_folder: bool = False) -> BeforeValidator:
    """Parse a value by a function that raises ConfigError. ``in_folder``: it also takes the folder that relative paths
    start at."""

    def read(value: object, info: ValidationInfo) -> object:
        folder = [(info.context or {}).get(BASE) or Path.cwd()] if in_folder else []
        try:
            return parse(value, *folder)
        except ConfigError as error:
            message = str(error)
        raise value_error(message, expected=expected)  # not chained: the cause may have a secret

    return BeforeValidator(read)


def choice(
    words: type[StrEnum], *, instead: Mapping[str, str] = MappingProxyType({})
) -> BeforeValidator:
    """Parse one word of a closed set. ``instead``: of words that are not of it, what to write in place of them."""
    expected = f"one of {', '.join(words)}"

    def read(value: object) -> object:
        if isinstance(value, str) and value in set(words):
            return words(value)
        near = instead.get(value) or hint_at(value, words) if isinstance(value, str) else ""
        raise misfit(value, expected, near)

    return parsed(read, expected)


def any_word(words: type[StrEnum]) -> WithJsonSchema:
    """JSON schema of a closed set."""
    return WithJsonSchema({"type": "string", "enum": [*words]})


def number_or_text(pattern: str, *, minimum: int | None) -> WithJsonSchema:
    """JSON schema of a whole number (without a ``minimum``: of any number above 0), or of text that matches a
    pattern."""
    number = {"type": "integer", "minimum": minimum}
    if minimum is None:
        number = {"type": "number", "exclusiveMinimum": 0}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


def _positive_rate(value: int | str) -> int:
    bytes_per_s = units.parse_rate(value)
    if bytes_per_s == 0:
        raise ConfigError(f"0 bytes per second is not a rate; expected {units.EXPECTED_RATE}")
    return bytes_per_s


def _bandwidth(value: int | str) -> int | float:
    if not isinstance(value, str) or "%" not in value:
        return _positive_rate(value)
    share = units.parse_share(value)
    if share == 0:
        raise ConfigError(f"0% is not a rate; expected {_EXPECTED_BANDWIDTH}")
    return float(share)


def _wait(value: float | str) -> float:
    negative = isinstance(value, int | float) and value < 0
    seconds = 0.0 if negative else units.parse_duration(value)
    if seconds == 0:
        raise ConfigError(f"{show(value)} is not above 0; expected {_EXPECTED_WAIT}")
    return seconds


def _chunk(value: int | str) -> int:
    size_bytes = units.parse_size(value)
    if size_bytes % CHUNK_BYTES_MIN or not CHUNK_BYTES_MIN <= size_bytes <= CHUNK_BYTES_MAX:
        raise misfit(value, _EXPECTED_CHUNK)
    return size_bytes


def _overhead(value: float | str) -> float:
    share = units.parse_share(value)
    if not 0 < share < 1:
        why = " leaves no time to train" if share else " is never spent"
        raise ConfigError(f"{show(value)}{why}; expected {_EXPECTED_OVERHEAD}")
    return share


def _whole_number(expected: str, most: int | None = None) -> BeforeValidator:
    """Parse a whole number from 1 to ``most``; also from digits in text, as ``${env:NAME}`` is always text."""

    def read(value: object) -> int:
        number = _whole(value)
        if number is None or number < 1 or (most is not None and number > most):
            raise misfit(value, expected)
        return number

    return parsed(read, expected)


def _url(value: object) -> str:
    """Check an address. No message contains it, as it may contain a secret."""
    if not isinstance(value, str):
        raise ConfigError(f"{show(value)} is not an address; expected {_EXPECTED_URL}")
    check_url(value)
    return value


def parse_every(value: object) -> int | float:
    """Parse a number of training steps (int), or a time in seconds (float). Raises ConfigError."""
    if isinstance(value, str) and (steps := _STEPS.fullmatch(value)):
        raise ConfigError(f"{show(value)}: a number of steps has no unit; expected {steps[1]}")
    found: int | float | None = _whole(value)
    if found is None and isinstance(value, str) and _TIME.match(value):
        found = units.parse_duration(value)
        if found == 0:
            raise ConfigError(f"{show(value)} is not above 0; expected {_EXPECTED_EVERY}")
    if found is None or found <= 0:
        raise misfit(value, _EXPECTED_EVERY)
    return found


def _write_every(value: int | float) -> int | str:
    """Serialize steps as a number and a time as text, so that the result parses to the same value."""
    return f"{value:.9f}s" if isinstance(value, float) else value


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def listen_address(value: object) -> tuple[str, int]:
    """Return the address (empty: all of this machine) and the port of ``9109``, ``:9109`` or ``127.0.0.1:9109``.

    Raises ConfigError for anything else.
    """
    address, _, digits = value.rpartition(":") if isinstance(value, str) else ("", "", value)
    port = _whole(digits)
    if port is None or not 1 <= port <= PORT_MAX or not address.isprintable() or " " in address:
        raise misfit(value, _EXPECTED_LISTEN)
    return address.strip("[]"), port


def _listen(value: object) -> int | str:
    address, port = listen_address(value)
    return f"{address}:{port}" if address else port


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise misfit(value, "true or false")


def _name(value: object) -> str:
    if not isinstance(value, str):
        quoted = f'; put it in quotes: "{value}"' if _whole(value) is not None else ""
        raise ConfigError(f"{show(value)} is not a name; expected {_EXPECTED_NAME}{quoted}")
    try:
        return keys.check_name(value, what="")
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(": ")) from error


def _interface(value: object) -> str:
    if isinstance(value, str):
        if _INTERFACE.fullmatch(value):
            return value
        with suppress(ValueError):
            return str(ip_network(value, strict=False))
    raise ConfigError(f"{show(value)} is no interface; expected {_EXPECTED_INTERFACE}")


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(value: object) -> bool:
    """Return whether a value is an address such as ``s3://bucket``, not a path."""
    return isinstance(value, str) and _ADDRESS.match(value) is not None


def no_address(expected: str) -> BeforeValidator:
    """Refuse an address where a path is expected. The message has its scheme only: an address may contain a secret."""

    def check(value: object) -> object:
        if is_address(value):
            scheme = str(value).partition("://")[0]
            raise ConfigError(f"{scheme}://... is an address; expected {expected}")
        return value

    return parsed(check, expected)


def _path(value: object, folder: Path) -> Path:
    """Make a path absolute: a relative one starts at ``folder``."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{show(value)} is not a path; expected a folder such as ./checkpoints")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.isprintable():
        raise ConfigError(
            f"{text!a} is not a path of printable text; expected a folder such as ./checkpoints"
        )
    if variable := _VARIABLE.search(text):
        name = variable[1] or variable[2]
        raise ConfigError(
            f"{show(text)} contains {variable[0]}, which is not replaced; write ${{env:{name}}}"
        )
    try:
        os.fsencode(text)
        expanded = Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{text!r} is not a usable path: {error}") from error
    return folder / expanded


Size = Annotated[
    int,
    parsed(units.parse_size_with_unit, units.EXPECTED_SIZE),
    number_or_text(units.SIZE_PATTERN, minimum=1024),
]
Chunk = Annotated[
    int,
    parsed(_chunk, _EXPECTED_CHUNK),
    number_or_text(units.SIZE_PATTERN, minimum=CHUNK_BYTES_MIN),
]
Rate = Annotated[
    int,
    parsed(_positive_rate, units.EXPECTED_RATE),
    number_or_text(units.RATE_PATTERN, minimum=1),
]
Bandwidth = Annotated[
    int | float,
    parsed(_bandwidth, _EXPECTED_BANDWIDTH),
    number_or_text(f"{units.RATE_PATTERN}|{units.SHARE_PATTERN}", minimum=1),
]
"""Bytes per second as an int, or a share of the measured rate as a float."""
Every = Annotated[
    int | float,
    parsed(parse_every, _EXPECTED_EVERY),
    PlainSerializer(_write_every),
    number_or_text(units.DURATION_PATTERN, minimum=1),
]
Wait = Annotated[
    float,
    parsed(_wait, _EXPECTED_WAIT),
    number_or_text(units.DURATION_PATTERN, minimum=None),
]
_SHARE_SCHEMA = WithJsonSchema({"type": "string", "pattern": units.SHARE_PATTERN})
_WRITE_SHARE = PlainSerializer(lambda share: f"{share * 100:.12g}%")
Share = Annotated[
    float, parsed(units.parse_share, units.EXPECTED_SHARE), _WRITE_SHARE, _SHARE_SCHEMA
]
Overhead = Annotated[float, parsed(_overhead, _EXPECTED_OVERHEAD), _WRITE_SHARE, _SHARE_SCHEMA]
Count = Annotated[
    int,
    _whole_number("a whole number, 1 or more"),
    WithJsonSchema({"type": "integer", "minimum": 1}),
]
Flag = Annotated[bool, parsed(_flag, "true or false"), WithJsonSchema({"type": "boolean"})]
Level = Annotated[
    int,
    _whole_number(f"a level from 1 to {LEVEL_MAX}", LEVEL_MAX),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": LEVEL_MAX}),
]
Url = Annotated[
    str, parsed(_url, _EXPECTED_URL), WithJsonSchema({"type": "string", "pattern": "^[a-z].*://"})
]
Listen = Annotated[
    int | str, parsed(_listen, _EXPECTED_LISTEN), number_or_text(":[0-9]+$", minimum=1)
]
"""A port, or an address and a port: see ``listen_address``."""
Name = Annotated[str, parsed(_name, _EXPECTED_NAME), WithJsonSchema(_NAME_SCHEMA)]
Interface = Annotated[
    str, parsed(_interface, _EXPECTED_INTERFACE), WithJsonSchema({"type": "string", "minLength": 1})
]
"""The name of a network interface, or a subnet in the form of ``ipaddress.ip_network``."""
Folder = Annotated[
    Path,
    parsed(_path, _EXPECTED_FOLDER, in_folder=True),
    WithJsonSchema({"type": "string", "minLength": 1}),
]


_EXPECTED_SIGNAL = "the name of a signal such as SIGTERM or SIGUSR1"
_EXPECTED_SIGNALS = "a list such as [SIGTERM]"
_FATAL = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS"}
)


def _signal(value: object) -> str:
    known = sorted({number.name for number in Signals} - _FATAL)
    if isinstance(value, str) and value in known:
        return value
    if isinstance(value, str) and value in _FATAL:
        raise ConfigError(f"a program cannot continue after {value}; expected {_EXPECTED_SIGNAL}")
    near = hint_at(value, known) if isinstance(value, str) else ""
    raise ConfigError(f"not a signal; expected {_EXPECTED_SIGNAL}{near}")


def _signal_names(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise misfit(value, _EXPECTED_SIGNALS)
    return tuple(dict.fromkeys(value)) if all(isinstance(name, str) for name in value) else value


Signal = Annotated[
    str, parsed(_signal, _EXPECTED_SIGNAL), WithJsonSchema({"type": "string", "pattern": "^SIG"})
]
SignalNames = Annotated[tuple[Signal, ...], parsed(_signal_names, _EXPECTED_SIGNALS)]
"""One or more."""


def signals_named(names: tuple[str, ...]) -> frozenset[Signals]:
    return frozenset(Signals[name] for name in names)
