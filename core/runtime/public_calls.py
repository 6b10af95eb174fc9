"""The public calls: what they raise is shown without tierfall's own frames, and calls that change a run are not made
within each other.

The message of a tierfall error says all: its traceback ends at the user's line, with one frame of tierfall, and has no
chain. The chain is logged at DEBUG, and ``__context__`` is the cause. If code of the user's is in the chain, such as a
policy or a ``state_dict``, the chain is shown.

A signal handler interrupts a call at any line, with locks held. Within it, calls that read a run work: a thread may
take their locks twice. Others are refused.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FunctionType, TracebackType
from typing import ParamSpec, TypeVar, cast

from tierfall.core.types.errors import ConfigError, TierfallError

logger = logging.getLogger("tierfall")
P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_OWN = frozenset(
    (
        *sys.stdlib_module_names,
        *(
            "tierfall",
            "torch",
            "numpy",
            "ml_dtypes",
            "safetensors",
            "pydantic",
            "pydantic_core",
            "yaml",
        ),
        *(
            "botocore",
            "urllib3",
            "fsspec",
            "s3fs",
            "gcsfs",
            "adlfs",
            "aiobotocore",
            "aiohttp",
            "obstore",
        ),
        *("zstandard", "prometheus_client", "rich", "typer", "click"),
    )
)
"""Packages whose frames are not the user's: tierfall, and what it calls."""


class _Calls(threading.local):
    """The public calls that are in progress on this thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


_calls = _Calls()


def is_within_another() -> bool:
    """Return whether a public call was made within another one of this thread, as by a signal handler."""
    return len(_calls.names) > 1


@contextmanager
def within_call(name: str) -> Iterator[None]:
    """Make what a hook does on the user's thread a public call."""
    _calls.names.append(name)
    try:
        yield
    finally:
        _calls.names.pop()


def public_call(function: Callable[P, T], *, alone: bool = False) -> Callable[P, T]:
    """Make a function a public call; ``alone``: it is refused within another one of its thread."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        names = _calls.names
        if alone and names:
            raise ConfigError(
                f"{name}: called within {names[-1]} of the same thread, as by a signal handler: let the handler set a "
                "flag, and make this call after that one"
            )
        names.append(name)
        try:
            return function(*args, **kwargs)
        except (TierfallError, TimeoutError) as error:
            if len(names) > 1 or _has_user_code(error):
                raise
            logger.debug("%s raises", name, exc_info=error)
            error.__traceback__ = None
            if any(map(_has_user_code, _chain(error))):
                raise error
            error.__context__ = error.__cause__ or error.__context__
            raise error from None
        finally:
            names.pop()

    return cast("Callable[P, T]", call)


def public_class(*, alone: Collection[str]) -> Callable[[C], C]:
    """Make all methods of a class that are not private public calls."""

    def decorate(cls: C) -> C:
        for name, member in list(vars(cls).items()):
            if isinstance(member, FunctionType) and not name.startswith("_"):
                setattr(cls, name, public_call(member, alone=name in alone))
        return cls

    return decorate


def copy_of(error: BaseException) -> BaseException:
    """Return a new exception like one that is kept, which causes it and stays as it is."""
    raised = copy.copy(error)
    raised.__cause__ = error
    return raised


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error and its causes, as a traceback shows them."""
    shown: BaseException | None = error
    while shown is not None:
        yield shown
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
