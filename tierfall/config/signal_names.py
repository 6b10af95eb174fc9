"""Names of signals, as the configuration has them: those after which a program can go on."""

from __future__ import annotations

from signal import Signals
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tierfall.config.fields import show, wrong
from tierfall.core.types.text import nearest

_EXPECTED = "the name of a signal such as SIGTERM or SIGUSR1"
_EXPECTED_LIST = "a list such as [SIGTERM]"
_NO_GOING_ON = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGSYS"}
)


def _read(value: object) -> object:
    known = sorted({number.name for number in Signals} - _NO_GOING_ON)
    if isinstance(value, str) and value in known:
        return value
    if isinstance(value, str) and value in _NO_GOING_ON:
        raise wrong(
            f"a program cannot go on after {value}; expected {_EXPECTED}", expected=_EXPECTED
        )
    near = nearest(value, known) if isinstance(value, str) else ""
    raise wrong(f"not a signal; expected {_EXPECTED}{near}", expected=_EXPECTED)


def _read_some(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise wrong(
            f"{show(value)} does not fit; expected {_EXPECTED_LIST}", expected=_EXPECTED_LIST
        )
    return tuple(dict.fromkeys(value)) if all(isinstance(name, str) for name in value) else value


Signal = Annotated[
    str, BeforeValidator(_read), WithJsonSchema({"type": "string", "pattern": "^SIG"})
]
SignalNames = Annotated[tuple[Signal, ...], BeforeValidator(_read_some)]
"""One or more."""


def signals_named(names: tuple[str, ...]) -> frozenset[Signals]:
    """Turn names into signals."""
    return frozenset(Signals[name] for name in names)
