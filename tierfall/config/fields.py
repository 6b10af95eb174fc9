"""The types of values in the configuration: how each is parsed, and its JSON schema.

A parser accepts what YAML yields (text, numbers, true or false) and raises pydantic's custom errors. ``expected`` of an
error never contains the value, so that it can be shown where the value is a secret. This module knows neither keys nor
files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from tierfall.backends.open import check_url
from tierfall.core.compression.frames import LEVEL_MAX, LEVEL_MIN
from tierfall.core.format.records import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from tierfall.core.types import keys, units
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hint_at

WRONG = "wrong_value"
BASE = "base"
"""The key of pydantic's context with the folder that relative paths start at; absent: the working directory."""

_NAME_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 200}
_EXPECTED_NAME = "at most 200 letters, digits, '.', '_' and '-', beginning with a letter or digit"
_EXPECTED_COUNT = "a whole number, 1 or more"
_EXPECTED_LEVEL = f"a level from {LEVEL_MIN} to {LEVEL_MAX}"
_EXPECTED_URL = "an address such as s3://bucket/prefix, gs://, az:// or file:///folder"
_EXPECTED_CHUNK = "a multiple of 4KiB from 4KiB to 1GiB"
_EXPECTED_FOLDER = "a folder such as ./checkpoints, with ${env:NAME} for a variable"
_EXPECTED_BANDWIDTH = f"{units.EXPECTED_RATE}, or a share such as 50%"
_EXPECTED_WAIT = "a time above 0, such as 60s"
_EXPECTED_LISTEN = "a port from 1 to 65535, or an address and a port such as 127.0.0.1:9109"
PORT_MAX = 65535
_EXPECTED_EVERY = "a whole number of training steps, 1 or more, or a time such as 10m"

_STEPS = re.compile(r"([0-9]+) ?(?:steps?|it|iters?|iterations?)")
_TIME = re.compile(rf"{units.NUMBER_PATTERN} ?(?!e[0-9])[a-z]", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def value_error(message: str, *, expected: str) -> PydanticCustomError:
    """Return the error for a wrong value. The texts are context, as pydantic interprets braces in a template."""
    return PydanticCustomError(WRONG, "{message}", {"message": message, "expected": expected})


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


def choice(
    words: type[StrEnum], *, instead: Mapping[str, str] = MappingProxyType({})
) -> BeforeValidator:
    """Parse one word of a closed set. ``instead``: of words that are not of it, what to write in place of them."""
    expected = f"one of {', '.join(words)}"

    def read(value: object) -> object:
        if isinstance(value, str) and value in set(words):
            return words(value)
        near = instead.get(value) or hint_at(value, words) if isinstance(value, str) else ""
        raise value_error(
            f"{show(value)} does not fit; expected {expected}{near}", expected=expected
        )

    return BeforeValidator(read)


def any_word(words: type[StrEnum]) -> WithJsonSchema:
    """JSON schema of a closed set."""
    return WithJsonSchema({"type": "string", "enum": [*words]})


def _parsed(parse: Callable[[Any], Any], expected: str) -> BeforeValidator:
    def read(value: object) -> object:
        try:
            return parse(value)
        except ConfigError as error:
            message = str(error)
        raise value_error(message, expected=expected)

    return BeforeValidator(read)


def number_or_text(pattern: str, *, minimum: int = 0, number: str = "integer") -> WithJsonSchema:
    """JSON schema of a number, or of text that matches a pattern."""
    return WithJsonSchema(
        {
            "anyOf": [
                {"type": number, "minimum": minimum},
                {"type": "string", "pattern": pattern},
            ]
        }
    )


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
        raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_CHUNK}")
    return size_bytes


def _count(value: object) -> int:
    """Parse a count; also from digits in text, as ``${env:NAME}`` is always text."""
    number = _whole(value)
    if number is None or number < 1:
        raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_COUNT}")
    return number


def _level(value: object) -> int:
    number = _whole(value)
    if number is None or not LEVEL_MIN <= number <= LEVEL_MAX:
        raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_LEVEL}")
    return number


def _url(value: object) -> str:
    """Check an address. No message contains it, as it may contain a secret."""
    if not isinstance(value, str):
        raise ConfigError(f"{show(value)} is not an address; expected {_EXPECTED_URL}")
    check_url(value)
    return value


def every() -> BeforeValidator:
    """Parse a number of training steps (int), or a time in seconds (float)."""
    return _parsed(_every, _EXPECTED_EVERY)


def _every(value: object) -> int | float:
    if isinstance(value, str) and (steps := _STEPS.fullmatch(value)):
        raise ConfigError(f"{show(value)}: a number of steps has no unit; expected {steps[1]}")
    number = _whole(value)
    if number is None and isinstance(value, str):
        if not _TIME.match(value):
            raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_EVERY}")
        seconds = units.parse_duration(value)
        if seconds == 0:
            raise ConfigError(f"{show(value)} is not above 0; expected {_EXPECTED_EVERY}")
        return seconds
    if number is None or number < 1:
        raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_EVERY}")
    return number


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
        raise ConfigError(f"{show(value)} does not fit; expected {_EXPECTED_LISTEN}")
    return address.strip("[]"), port


def _listen(value: object) -> int | str:
    address, port = listen_address(value)
    return f"{address}:{port}" if address else port


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ConfigError(f"{show(value)} does not fit; expected true or false")


def _name(value: object) -> str:
    if not isinstance(value, str):
        quoted = f'; put it in quotes: "{value}"' if _whole(value) is not None else ""
        raise ConfigError(f"{show(value)} is not a name; expected {_EXPECTED_NAME}{quoted}")
    try:
        return keys.check_name(value, what="")
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(": ")) from error


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(value: object) -> bool:
    """Return whether a value is an address such as ``s3://bucket``, not a path."""
    return isinstance(value, str) and _ADDRESS.match(value) is not None


def no_address(expected: str) -> BeforeValidator:
    """Refuse an address where a path is expected. The message has its scheme only: an address may contain a secret."""

    def check(value: object) -> object:
        if is_address(value):
            scheme = str(value).partition("://")[0]
            raise value_error(
                f"{scheme}://... is an address; expected {expected}", expected=expected
            )
        return value

    return BeforeValidator(check)


def _path(value: object, base: Path | None) -> Path:
    """Make a path absolute: a relative one starts at ``base``, or at the working directory."""
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
    return Path.cwd() / (base or "") / expanded


def _read_path(value: object, info: ValidationInfo) -> Path:
    try:
        return _path(value, (info.context or {}).get(BASE))
    except ConfigError as error:
        message = str(error)
    raise value_error(message, expected=_EXPECTED_FOLDER)


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder of the file that is validated; the working directory where there is none."""
    return (info.context or {}).get(BASE) or Path.cwd()


Size = Annotated[
    int,
    _parsed(units.parse_size_with_unit, units.EXPECTED_SIZE),
    number_or_text(units.SIZE_PATTERN, minimum=1024),
]
Chunk = Annotated[
    int,
    _parsed(_chunk, _EXPECTED_CHUNK),
    number_or_text(units.SIZE_PATTERN, minimum=CHUNK_BYTES_MIN),
]
Rate = Annotated[
    int,
    _parsed(_positive_rate, units.EXPECTED_RATE),
    number_or_text(units.RATE_PATTERN, minimum=1),
]
Bandwidth = Annotated[
    int | float,
    _parsed(_bandwidth, _EXPECTED_BANDWIDTH),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": units.RATE_PATTERN},
                {"type": "string", "pattern": units.SHARE_PATTERN},
            ]
        }
    ),
]
"""Bytes per second as an int, or a share of the measured rate as a float."""
Duration = Annotated[
    float,
    _parsed(units.parse_duration, units.EXPECTED_DURATION),
    number_or_text(units.DURATION_PATTERN, number="number"),
]
Wait = Annotated[
    float,
    _parsed(_wait, _EXPECTED_WAIT),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": units.DURATION_PATTERN},
            ]
        }
    ),
]
Share = Annotated[
    float,
    _parsed(units.parse_share, units.EXPECTED_SHARE),
    WithJsonSchema({"type": "string", "pattern": units.SHARE_PATTERN}),
]
Count = Annotated[
    int, _parsed(_count, _EXPECTED_COUNT), WithJsonSchema({"type": "integer", "minimum": 1})
]
Flag = Annotated[bool, _parsed(_flag, "true or false"), WithJsonSchema({"type": "boolean"})]
Level = Annotated[
    int,
    _parsed(_level, _EXPECTED_LEVEL),
    WithJsonSchema({"type": "integer", "minimum": LEVEL_MIN, "maximum": LEVEL_MAX}),
]
Url = Annotated[
    str, _parsed(_url, _EXPECTED_URL), WithJsonSchema({"type": "string", "pattern": "^[a-z].*://"})
]
Listen = Annotated[
    int | str,
    _parsed(_listen, _EXPECTED_LISTEN),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": PORT_MAX},
                {"type": "string", "pattern": ":[0-9]+$"},
            ]
        }
    ),
]
"""A port, or an address and a port: see ``listen_address``."""
Name = Annotated[str, _parsed(_name, _EXPECTED_NAME), WithJsonSchema(_NAME_SCHEMA)]
Folder = Annotated[
    Path,
    BeforeValidator(_read_path),
    WithJsonSchema({"type": "string", "minLength": 1}),
]


_EXPECTED_SIGNAL = "the name of a signal such as SIGTERM or SIGUSR1"
_EXPECTED_SIGNALS = "a list such as [SIGTERM]"
_FATAL = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS"}
)


def _signal(value: object) -> object:
    known = sorted({number.name for number in Signals} - _FATAL)
    if isinstance(value, str) and value in known:
        return value
    if isinstance(value, str) and value in _FATAL:
        raise value_error(
            f"a program cannot continue after {value}; expected {_EXPECTED_SIGNAL}",
            expected=_EXPECTED_SIGNAL,
        )
    near = hint_at(value, known) if isinstance(value, str) else ""
    raise value_error(f"not a signal; expected {_EXPECTED_SIGNAL}{near}", expected=_EXPECTED_SIGNAL)


def _signal_names(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise value_error(
            f"{show(value)} does not fit; expected {_EXPECTED_SIGNALS}", expected=_EXPECTED_SIGNALS
        )
    return tuple(dict.fromkeys(value)) if all(isinstance(name, str) for name in value) else value


Signal = Annotated[
    str, BeforeValidator(_signal), WithJsonSchema({"type": "string", "pattern": "^SIG"})
]
SignalNames = Annotated[tuple[Signal, ...], BeforeValidator(_signal_names)]
"""One or more."""


def signals_named(names: tuple[str, ...]) -> frozenset[Signals]:
    return frozenset(Signals[name] for name in names)
