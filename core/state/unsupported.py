"""How a state is refused: one error, which names the place of what cannot be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from tierfall.core.tensors import names
from tierfall.core.tensors.names import Trail
from tierfall.core.types.errors import CaptureError

T = TypeVar("T")


def refusal(trail: Trail, reason: str) -> CaptureError:
    return CaptureError(f"save: {names.path(trail)} {reason}")


def refuse(trail: Trail, reason: str) -> NoReturn:
    raise refusal(trail, reason)


def call_of_user(ask: Callable[[], T], what: str, trail: Trail) -> T:
    """Call what is not tierfall's own; whatever it raises is told with its place."""
    try:
        return ask()
    except Exception as error:
        reason = f"cannot be saved: its {what} raised {type(error).__name__}: {error}"
        raise refusal(trail, reason) from error
