"""Every error that tierfall raises, as one tree.

    TierfallError
    |-- ConfigError          the YAML, an argument of open, or a second Checkpointer of one run
    |   `-- NotSupportedError     only a later version supports it
    |-- CaptureError         the state cannot be serialised, or changed during capture
    |   `-- StateChangedError     tensors were written to between save() and the next optimizer step
    |-- StepError            a step that is saved already, is below the newest saved one, or does not exist
    |-- FlushError           a copy could not be made durable on a tier
    |-- FencedError          a newer attempt of this run exists: this process must not write any more
    |-- RestoreError         no checkpoint could be restored, or it does not fit the state
    |-- IntegrityError       stored bytes are not the bytes that were written
    |-- CapacityError        a tier has no room
    |-- RanksError           a rank is missing, or the ranks made different calls
    |-- LockError            another process owns the run on this machine
    `-- BackendError         storage refused or failed
        |-- KeyInvalidError       a name that could leave the tier's folder
        |-- KeyNotFoundError      the store answered: the key is absent
        |-- KeyExistsError        a conditional create found the key
        |-- TruncatedError        the object ends before the bytes that were asked for
        |-- StorageFullError      no space, or a quota is reached
        |-- AccessDeniedError     the store answered: not allowed
        |-- LostWriteError        what was written may be lost: rewrite the object
        `-- UnreachableError      the store did not answer

A message names the operation, the place and what to do. ``retryable``: the same call may succeed a moment later.
``is_damage``: what is stored is not what was written, by a digest, by a size, or by the store's own answer that a key
is absent. After any other error nothing is known of it: it could not be read, and nothing is passed over, rewritten or
deleted because of that.
"""

from __future__ import annotations

import traceback
from typing import ClassVar

from pydantic_core import core_schema

from tierfall.core.types.text import without_secrets

__all__ = [
    "AccessDeniedError",
    "BackendError",
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "FencedError",
    "FlushError",
    "IntegrityError",
    "KeyExistsError",
    "KeyInvalidError",
    "KeyNotFoundError",
    "LockError",
    "LostWriteError",
    "NotSupportedError",
    "RanksError",
    "RestoreError",
    "StateChangedError",
    "StepError",
    "StorageFullError",
    "TierfallError",
    "TruncatedError",
    "UnreachableError",
]
"""What ``tierfall.errors`` and ``tierfall`` have."""


class TierfallError(Exception):
    """The base of every error that tierfall raises on purpose. Its text has no secret of an address."""

    __module__ = "tierfall"  # where users import it from, in tracebacks too
    retryable: ClassVar[bool] = False
    is_damage: ClassVar[bool] = False
    known_to_all = False
    """Whether a call of all ranks has raised it, on each of them."""

    def __init_subclass__(cls) -> None:
        """Show a class of tierfall's that is not public as the public one that it is a kind of."""
        if cls.__module__.startswith("tierfall."):
            if cls.__module__ != __name__:
                cls.__name__ = cls.__qualname__ = cls.__bases__[0].__name__
            cls.__module__ = TierfallError.__module__

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(a) if isinstance(a, str) else a for a in args))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the class that it is shown as."""
        kind, made = type(self), super().__reduce__()  # of an OSError with its filename
        is_own = kind.__module__ == TierfallError.__module__
        return error_class(kind.__name__, kind) if is_own else kind, *made[1:]

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: object
    ) -> core_schema.CoreSchema:
        """An error in a message between ranks; see ``core/ranks/messages.py:ErrorMessage``."""
        return core_schema.no_info_plain_validator_function(_of_message)


def is_damage(error: BaseException | None) -> bool:
    """Return whether an error shows damage; see the module."""
    return isinstance(error, TierfallError) and error.is_damage


class ConfigError(TierfallError, ValueError):
    """The configuration or an argument is wrong; the message names the place and what was expected."""


class NotSupportedError(ConfigError):
    """A feature or a format that this version does not support."""


class CaptureError(TierfallError):
    """A state that cannot be saved, or that changed while it was captured."""


class StateChangedError(CaptureError):
    """Tensors were written to between save() and the next optimizer step; ``tensors`` are their names in the image."""

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class StepError(TierfallError, ValueError):
    """A step that is saved already, is not above the newest checkpoint of the lineage, or is not known."""


class FlushError(TierfallError):
    """A copy could not be made durable on a tier; the cause is chained."""


class FencedError(TierfallError):
    """A newer attempt of this run exists; this process has stopped writing."""


class RestoreError(TierfallError):
    """A checkpoint could not be restored, or does not fit the given state."""


class IntegrityError(TierfallError):
    """Stored bytes differ from the digest that was recorded when they were written."""

    is_damage: ClassVar[bool] = True


class CapacityError(TierfallError):
    """A tier has no room for a checkpoint; the message has the bytes needed and available."""


class RanksError(TierfallError):
    """A rank is missing, or the ranks made different calls; the message names the ranks."""


class LockError(TierfallError):
    """Another living process owns this run on this machine."""


class BackendError(TierfallError):
    """Storage refused or failed; the original exception is chained."""


class KeyInvalidError(BackendError, ValueError):
    """A key that is empty, absolute, too long, or could leave the tier's folder."""


class KeyNotFoundError(BackendError, FileNotFoundError):
    """The store answered that the key is not there."""

    is_damage: ClassVar[bool] = True


class KeyExistsError(BackendError, FileExistsError):
    """A conditional create found that the key exists."""


class TruncatedError(BackendError):
    """The object ends before the bytes that were asked for."""

    is_damage: ClassVar[bool] = True


class StorageFullError(BackendError):
    """No space is left, or a quota is reached."""


class AccessDeniedError(BackendError, PermissionError):
    """The store answered that this process may not do that."""


class LostWriteError(BackendError):
    """What was written may be lost (a failed fsync, a tier that was remounted). Repeating the call does not help;
    rewriting the object may."""


class UnreachableError(BackendError):
    """The store did not answer, or failed temporarily: nothing is known about its content."""

    retryable: ClassVar[bool] = True


def _of_message(body: object) -> TierfallError:
    match body:
        case {"kind": str(kind), "text": str(text)}:
            return error_class(kind, RanksError)(text)
    raise ValueError("expected an error")


def error_class(name: str, otherwise: type[TierfallError]) -> type[TierfallError]:
    """Look up the class of an error that another process reported; ``otherwise`` if this version has no such class."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TierfallError) else otherwise


def release_frames(error: BaseException) -> None:
    """Free what the frames of a caught error hold, such as memory of an image. A handle may keep the error.

    A frame that still runs cannot be cleared, so that the tracebacks of the error and of its causes are dropped. A note
    has the text of the traceback where tierfall did not raise the error, and so it may not say what happened.
    """
    if not isinstance(error, Exception):  # it goes on to whoever ends the program
        return
    if not isinstance(error, TierfallError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    left: list[BaseException] = [error]
    seen: set[int] = set()  # causes may form a circle
    while left:
        each = left.pop()
        seen.add(id(each))
        each.__traceback__ = None
        linked = (each.__cause__, each.__context__)
        left += [cause for cause in linked if cause is not None and id(cause) not in seen]
