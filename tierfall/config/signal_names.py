"""Names of signals, as the configuration has them: those that tell a process of what is to come, and no others."""

from __future__ import annotations

from signal import Signals
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tierfall.config.fields import nearest, show, wrong

ALLOWED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_EXPECTED = f"a list of {', '.join(ALLOWED)}"


def _read(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise wrong(f"{show(value)} does not fit; expected {_EXPECTED}", expected=_EXPECTED)
    for name in value:
        if name not in ALLOWED:
            near = nearest(name, ALLOWED) if isinstance(name, str) else ""
            raise wrong(
                f"{show(name)} is no signal to listen to; expected {_EXPECTED}{near}",
                expected=_EXPECTED,
            )
    return tuple(dict.fromkeys(value))


SignalNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_read),
    WithJsonSchema(
        {"type": "array", "items": {"type": "string", "enum": list(ALLOWED)}, "minItems": 1}
    ),
]


def signals_named(names: tuple[str, ...]) -> frozenset[Signals]:
    """Turn names into signals."""
    return frozenset(Signals[name] for name in names)
