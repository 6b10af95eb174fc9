"""The public calls: what they raise is shown without tierfall's own frames, and calls that change a run are not made
within each other.

The message of a tierfall error says all: its traceback ends at the user's line, with one frame of tierfall, and has no
chain. The chain is logged at DEBUG, and ``__context__`` is the cause. If code of the user's is in the chain, such as a
policy or a ``state_dict``, the chain is shown.

A signal handler interrupts a call at any line, with locks held. Within it, calls that read a run work: a thread may
take their locks twice. Others are refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from inspect import currentframe
from types import FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from tierfall.core.types.errors import CapacityError, ConfigError, TierfallError
from tierfall.core.types.text import hint_at, signature_text

logger = logging.getLogger("tierfall")
P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_OWN = sys.stdlib_module_names | {
    *("tierfall", "torch", "numpy", "ml_dtypes", "safetensors", "pydantic", "pydantic_core"),
    *("yaml", "zstandard", "prometheus_client", "rich", "typer", "click"),
    *("botocore", "urllib3", "fsspec", "s3fs", "gcsfs", "adlfs", "aiobotocore", "aiohttp", "azure"),
}
"""Packages whose frames are not the user's: tierfall, and what it calls."""


_NO_THREAD = "can't start new thread"
"""The text of Python's RuntimeError at the limit of processes."""


def is_within_another() -> bool:
    """Return whether a public call was made within another one of this thread, as by a signal handler."""
    inner = _call_around(currentframe())
    return inner is not None and _call_around(inner.f_back) is not None


def _call_around(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the innermost public call that is in progress around a frame. Nothing is noted of a call: an
    interrupt would leave the note behind."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def public_call(function: Callable[P, T], *, alone: bool = False) -> Callable[P, T]:
    """Make a function a public call; ``alone``: it is refused within another one of its thread."""
    name = function.__name__.strip("_")
    signature = inspect.signature(function)
    flags = {p.name for p in signature.parameters.values() if isinstance(p.default, bool)}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        around = _call_around(cast("FrameType", currentframe()).f_back)
        if alone and around is not None:
            raise ConfigError(
                f"{name}: called within {around.f_locals['name']} of the same thread, as by a signal handler: let the "
                "handler set a flag, and make this call after that one"
            )
        try:
            _check_flags(name, {flag: kwargs[flag] for flag in flags & kwargs.keys()})
            return function(*args, **kwargs)
        except (TierfallError, TimeoutError) as error:
            if around is not None or _has_user_code(error):
                raise
            logger.debug("%s raises", name, exc_info=error)
            error.__traceback__ = None
            if any(map(_has_user_code, _chain(error))):
                raise error
            error.__context__ = error.__cause__ or error.__context__
            raise error from None
        except RuntimeError as error:
            if str(error) != _NO_THREAD:
                raise
            logger.debug("%s raises", name, exc_info=error)
            raise CapacityError(
                f"{name}: this process cannot start another thread: raise the limit of processes (`ulimit -u`, the "
                "container's pids limit)"
            ) from None
        except TypeError as error:
            _add_signature(error, name, signature, args, kwargs)
            raise

    return cast("Callable[P, T]", call)


def _check_flags(name: str, values: Mapping[str, object]) -> None:
    for flag, value in values.items():
        if not isinstance(value, bool) and getattr(value, "ndim", None) != 0:  # NumPy's, torch's
            raise ConfigError(f"{name}: {flag} is {value!r:.80}; expected True or False")


def _add_signature(
    error: TypeError, name: str, signature: inspect.Signature, args: Any, kwargs: Any
) -> None:
    """If the arguments do not fit, add how the function is called, and end the traceback at the user's line."""
    with suppress(TypeError):
        signature.bind(*args, **kwargs)
        return
    near = "".join(
        hint_at(each, signature.parameters) for each in kwargs.keys() - signature.parameters.keys()
    )
    shown = signature_text(each for each in signature.parameters.values() if each.name != "self")
    error.args = (f"{error}; it is called as {name}{shown}{near}",)
    error.__traceback__ = None


_CALL = public_call(lambda: None).__code__
"""The code that all public calls have in common."""


def public_class(*, alone: Collection[str]) -> Callable[[C], C]:
    """Make all methods of a class that are not private public calls."""

    def decorate(cls: C) -> C:
        for name, member in list(vars(cls).items()):
            if isinstance(member, FunctionType) and not name.startswith("_"):
                setattr(cls, name, public_call(member, alone=name in alone))
        return cls

    return decorate


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error and its causes, as a traceback shows them."""
    shown: BaseException | None = error
    seen: list[BaseException] = []
    while shown is not None and shown not in seen:
        yield shown
        seen.append(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def _has_user_code(error: BaseException) -> bool:
    """Return whether an error passed through a frame that is neither tierfall's nor of what tierfall calls."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _OWN:
            return True
        traceback = traceback.tb_next
    return False
