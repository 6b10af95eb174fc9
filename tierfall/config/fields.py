"""The types of values in the configuration: how each is parsed, and its JSON schema.

A parser accepts what YAML yields (text, numbers, true or false) and raises ConfigError, which pydantic adds to its
ValidationError. This module knows neither keys nor files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from signal import Signals
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)

from tierfall.backends.open import check_url
from tierfall.core.compression.codec import LEVEL_MAX
from tierfall.core.format.records import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from tierfall.core.types import keys, units
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hint_at
from tierfall.core.types.values import Verify

BASE = "base"
"""The key of pydantic's context with the folder that relative paths start at; absent: the working directory."""

_EXPECTED_INTERFACE = "the name of a network interface such as ib0, or a subnet such as 10.1.0.0/16"
_EXPECTED_LISTEN = "a port from 1 to 65535, or an address and a port such as 127.0.0.1:9109"
_EXPECTED_EVERY = "a whole number of training steps, 1 or more, or a time such as 10m"
_EXPECTED_SIGNAL = "the name of a signal such as SIGTERM or SIGUSR1"

_STEPS = re.compile(r"([0-9]+) ?(?:steps?|it|iters?|iterations?)")
_TIME = re.compile(rf"{units.NUMBER_PATTERN} ?(?!e[0-9])[a-z]", re.IGNORECASE)
_INTERFACE = re.compile(r"[A-Za-z][^\s/:]{0,14}")
"""As Linux allows it: 15 characters at most, without a slash or a colon."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FATAL = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS"}
)


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


def misfit(value: object, expected: str) -> ConfigError:
    """Return the error for a value that does not fit."""
    return ConfigError(f"{show(value)} does not fit; expected {expected}")


def is_address(value: object) -> bool:
    """Return whether a value is an address such as ``s3://bucket``, not a path."""
    return isinstance(value, str) and _ADDRESS.match(value) is not None


def _number_or_text(pattern: str, **number: object) -> WithJsonSchema:
    """JSON schema of a number, or of text that matches a pattern."""
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


def _whole(value: object) -> int | None:
    """Return a whole number; also of digits in text, as ``${env:NAME}`` is always text. None of anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: object) -> int:
    number = _whole(value)
    if number is None or number < 1:
        raise misfit(value, "a whole number, 1 or more")
    return number


def _level(value: object) -> int:
    level = _whole(value)
    if level is None or not 1 <= level <= LEVEL_MAX:
        raise misfit(value, f"a level from 1 to {LEVEL_MAX}")
    return level


def _bandwidth(value: int | str) -> int | float:
    if not isinstance(value, str) or "%" not in value:
        return units.parse_positive_rate(value)
    share = units.parse_share(value)
    if share == 0:
        raise ConfigError(
            f"0% is not a rate; expected {units.EXPECTED_RATE}, or a share such as 50%"
        )
    return share


def _free(value: int | str) -> int | float:
    if not isinstance(value, str) or "%" not in value:
        return units.parse_size_with_unit(value)
    share = units.parse_share(value)
    if share in (0, 1):
        raise ConfigError("0% keeps nothing free, 100% no room; expected a share such as 10%")
    return share


def _wait(value: float | str) -> float:
    negative = isinstance(value, int | float) and value < 0
    seconds = 0.0 if negative else units.parse_duration(value)
    if seconds == 0:
        raise ConfigError(
            f"{show(value)} is not above 0; expected a time above 0, such as 250ms, 60s, 10m or 4h"
        )
    return seconds


def _chunk(value: int | str) -> int:
    size_bytes = units.parse_size(value)
    if size_bytes % CHUNK_BYTES_MIN or not CHUNK_BYTES_MIN <= size_bytes <= CHUNK_BYTES_MAX:
        raise misfit(value, "a multiple of 4KiB from 4KiB to 1GiB")
    return size_bytes


def _url(value: str) -> str:
    """Check an address. No message contains it, as it may contain a secret."""
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


def listen_address(value: object) -> tuple[str, int]:
    """Return the address (empty: all of this machine) and the port of ``9109``, ``:9109`` or ``127.0.0.1:9109``.

    Raises ConfigError for anything else.
    """
    address, _, digits = value.rpartition(":") if isinstance(value, str) else ("", "", value)
    port = _whole(digits)
    if port is None or not 1 <= port <= 65535 or not address.isprintable() or " " in address:
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


def _switch(value: object) -> object:
    """Accept true and false too, as YAML parses ``on`` and ``off`` to these; a variable's value is text."""
    if value is True or value == "true":
        return Verify.FULL
    return Verify.OFF if value is False or value == "false" else value


def _name(value: str) -> str:
    try:
        return keys.check_name(value, what="")
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(": ")) from error


def _tags(value: object) -> object:
    if value is True or value == "true":
        return True
    if isinstance(value, list | tuple) and value and all(isinstance(tag, str) for tag in value):
        return tuple(keys.check_name(tag, what="tag") for tag in value)
    raise misfit(value, "true for any tag, or a list of tags such as [release]")


def _interface(value: str) -> str:
    if _INTERFACE.fullmatch(value):
        return value
    with suppress(ValueError):
        return str(ip_network(value, strict=False))
    raise ConfigError(f"{show(value)} is no interface; expected {_EXPECTED_INTERFACE}")


def _path(value: object, info: ValidationInfo) -> Path:
    """Make a path absolute: a relative one starts at the folder of the file. Of an address, which may contain a secret,
    the message has the scheme only."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{show(value)} is not a path; expected a folder such as ./checkpoints")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.isprintable():
        raise ConfigError(
            f"{text!a} is not a path of printable text; expected a folder such as ./checkpoints"
        )
    if is_address(text):
        raise ConfigError(
            f"{text.partition('://')[0]}://... is an address; expected a file or folder of this machine. An address is "
            'the url of a tier: {name: store, kind: object, url: "s3://bucket/prefix"}'
        )
    if variable := _VARIABLE.search(text):
        name = variable[1] or variable[2]
        raise ConfigError(
            f"{show(text)} contains {variable[0]}, which is not replaced; write ${{env:{name}}}, and the value in "
            "quotes"
        )
    try:
        os.fsencode(text)
        expanded = Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"{text!r} is not a usable path: {str(error).rstrip('.')}; write it in full"
        ) from error
    return folder_of_file(info) / expanded


def folder_of_file(info: ValidationInfo) -> Path:
    """Return the folder that relative paths start at."""
    return (info.context or {}).get(BASE) or Path.cwd()


def _signal(value: str) -> str:
    known = sorted({number.name for number in Signals} - _FATAL)
    if value in _FATAL:
        raise ConfigError(f"a program cannot continue after {value}; expected {_EXPECTED_SIGNAL}")
    if value not in known:
        raise ConfigError(
            f"{show(value)} is not a signal; expected {_EXPECTED_SIGNAL}{hint_at(value, known)}"
        )
    return value


def signals_named(names: Sequence[str]) -> frozenset[Signals]:
    return frozenset(Signals[name] for name in names)


Size = Annotated[
    int,
    BeforeValidator(units.parse_size_with_unit),
    _number_or_text(units.SIZE_PATTERN, type="integer", minimum=1024),
]
Chunk = Annotated[
    int,
    BeforeValidator(_chunk),
    _number_or_text(units.SIZE_PATTERN, type="integer", minimum=CHUNK_BYTES_MIN),
]
Rate = Annotated[
    int,
    BeforeValidator(units.parse_positive_rate),
    _number_or_text(units.RATE_PATTERN, type="integer", minimum=1),
]
Bandwidth = Annotated[
    int | float,
    BeforeValidator(_bandwidth),
    _number_or_text(f"{units.RATE_PATTERN}|{units.SHARE_PATTERN}", type="integer", minimum=1),
]
"""Bytes per second as an int, or a share of the measured rate as a float."""
Free = Annotated[
    int | float,
    BeforeValidator(_free),
    _number_or_text(f"{units.SIZE_PATTERN}|{units.SHARE_PATTERN}", type="integer", minimum=1024),
]
"""Bytes as an int, or a share of the disk as a float."""
Every = Annotated[
    int | float,
    BeforeValidator(parse_every),
    PlainSerializer(_write_every),
    _number_or_text(units.DURATION_PATTERN, type="integer", minimum=1),
]
Wait = Annotated[
    float,
    BeforeValidator(_wait),
    _number_or_text(units.DURATION_PATTERN, type="number", exclusiveMinimum=0),
]
_SHARE_SCHEMA = WithJsonSchema({"type": "string", "pattern": units.SHARE_PATTERN})
_WRITE_SHARE = PlainSerializer(lambda share: f"{share * 100:.12g}%")
Share = Annotated[float, BeforeValidator(units.parse_share), _WRITE_SHARE, _SHARE_SCHEMA]
Overhead = Annotated[float, BeforeValidator(units.parse_overhead), _WRITE_SHARE, _SHARE_SCHEMA]
Count = Annotated[int, Field(ge=1), BeforeValidator(_count)]
Level = Annotated[int, Field(ge=1, le=LEVEL_MAX), BeforeValidator(_level)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Switch = Annotated[
    Verify, BeforeValidator(_switch), WithJsonSchema({"enum": [*Verify, True, False]})
]
Url = Annotated[str, AfterValidator(_url), Field(json_schema_extra={"pattern": "^[a-z].*://"})]
Listen = Annotated[
    int | str, BeforeValidator(_listen), _number_or_text(":[0-9]+$", type="integer", minimum=1)
]
"""A port, or an address and a port: see ``listen_address``."""
Name = Annotated[
    str,
    AfterValidator(_name),
    Field(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 200}),
]
Tags = Annotated[bool | tuple[str, ...], BeforeValidator(_tags)]
Interface = Annotated[str, AfterValidator(_interface)]
"""The name of a network interface, or a subnet in the form of ``ipaddress.ip_network``."""
Folder = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
Signal = Annotated[str, AfterValidator(_signal), Field(json_schema_extra={"pattern": "^SIG"})]
