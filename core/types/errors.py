"""Every error that tierfall raises, as one tree.

    TierfallError
    |-- ConfigError          the YAML, an argument of open, or a second Checkpointer of one run
    |   `-- NotSupportedError     what a later version does; said, never ignored
    |-- CaptureError         the state cannot be written down, or changed under its capture
    |   `-- StateChangedError     tensors were written to between save() and the next optimizer step
    |-- StepError            a step that was saved already, lies behind the line, or does not exist
    |-- FlushError           a copy could not be made durable on a tier
    |-- FencedError          a newer attempt of this run exists: this process must not write any more
    |-- RestoreError         no checkpoint could be restored, or it does not fit the state
    |-- IntegrityError       stored bytes are not the bytes that were written
    |-- CapacityError        a tier has no room
    |-- RanksError           the ranks of a run did not act together: one is missing, or made another call
    |-- LockError            another process owns the run on this machine
    `-- BackendError         storage refused or failed
        |-- KeyInvalidError       a name that could leave the tier's folder
        |-- KeyNotFoundError      the store answered: it is not there
        |-- KeyExistsError        a conditional create lost
        |-- StorageFullError      no space, or a quota is reached
        |-- AccessDeniedError     the store answered: not allowed
        |-- LostWriteError        what was written may be lost: write it anew
        `-- UnreachableError      the store did not answer: could not look

A message names operation, place and what to do. ``retryable`` says whether the same call may succeed a moment later.
"""

from __future__ import annotations

from typing import ClassVar


class TierfallError(Exception):
    """The root: catch it to catch everything that tierfall raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigError(TierfallError, ValueError):
    """The configuration or an argument is wrong; the message says where, and what was expected."""


class NotSupportedError(ConfigError):
    """A documented feature that this version does not act on yet."""


class CaptureError(TierfallError):
    """A state that cannot be saved, or that changed while it was captured."""


class StateChangedError(CaptureError):
    """Tensors were written to between save() and the next optimizer step; ``tensors`` are their names in the image."""

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class StepError(TierfallError, ValueError):
    """A step that was saved already, lies behind the line that is being saved, or is not known."""


class FlushError(TierfallError):
    """A copy could not be made durable on a tier; the cause is chained."""


class FencedError(TierfallError):
    """A newer attempt of this run exists; this process has stopped writing."""


class RestoreError(TierfallError):
    """A checkpoint could not be restored, or does not fit the state that it was asked into."""


class IntegrityError(TierfallError):
    """Stored bytes differ from the digest that was recorded when they were written."""


class CapacityError(TierfallError):
    """A tier has no room for a checkpoint; the message holds what is needed and what there is."""


class RanksError(TierfallError):
    """The ranks of a run did not act together; the message names who was missing, or did something else."""


class LockError(TierfallError):
    """Another living process owns this run on this machine."""


class BackendError(TierfallError):
    """Storage refused or failed; the original exception is chained."""


class KeyInvalidError(BackendError, ValueError):
    """A key that is empty, absolute, too long, or could leave the tier's folder."""


class KeyNotFoundError(BackendError, FileNotFoundError):
    """The store answered that the key is not there."""


class KeyExistsError(BackendError, FileExistsError):
    """A conditional create found the key taken."""


class StorageFullError(BackendError):
    """No space is left, or a quota is reached."""


class AccessDeniedError(BackendError, PermissionError):
    """The store answered that this process may not do that."""


class LostWriteError(BackendError):
    """What was written may be lost (a failed fsync, a tier that was mounted anew): the same call does not mend that,
    while writing the object anew may well succeed."""


class UnreachableError(BackendError):
    """The store did not answer, or failed in a way that may pass: nothing is known about what it holds."""

    retryable: ClassVar[bool] = True


def error_class(name: str, otherwise: type[TierfallError]) -> type[TierfallError]:
    """Return the error of this page that another process names; ``otherwise`` where this version has none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TierfallError) else otherwise
