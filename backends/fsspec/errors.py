"""From what fsspec's filesystems raise to the error tree, in one place.

Each brings exceptions of its own libraries, so everything is taken here that is an Exception. Only its kind, its errno
and its status are used: a text may repeat a request with all that stands in it. Nothing is chained, for the same
reason.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tierfall.backends.object.responses import KEYS_HINT, answer_error, silence_error
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    StorageFullError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What aiohttp and asyncio call a request that got no answer; their classes are not imported for it.
_SILENT = {"ClientError", "IncompleteRead", "IncompleteReadError"}


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise what a filesystem raises as a BackendError; a BackendError passes as it is."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:  # noqa: BLE001 - there is no smaller class that all filesystems share
        raise store_error(error, what) from None


def store_error(error: Exception, what: str) -> BackendError:
    """Make the error for an exception of a filesystem's."""
    names = {each.__name__ for each in type(error).__mro__}
    is_silent = isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError)
    answer = _answer_in(error)
    if answer is None and (is_silent or names & _SILENT):
        # What caused it may have a number that looks like a status: a broken answer is 400 to aiohttp's parser.
        return silence_error(type(error).__name__, what)
    answer = answer or _answer_in(error.__cause__)
    if answer == (404, ""):
        # With no code behind it this is the filesystem's own word, not that of whatever stands before a store.
        return KeyNotFoundError(f"{what}: there is no such object")
    if answer is not None:
        return answer_error(*answer, what)
    if isinstance(error, FileNotFoundError):
        return KeyNotFoundError(f"{what}: there is no such object")
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return BackendError(f"{what}: a folder and an object would have the same name")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{what}: not allowed; {KEYS_HINT}")
    if isinstance(error, OSError):
        return _system_error(error, what)
    return BackendError(f"{what}: {type(error).__name__} in fsspec")


def _system_error(error: OSError, what: str) -> BackendError:
    if error.errno in _FULL:
        return StorageFullError(f"{what}: no space is left; free some")
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return silence_error(reason, what)


def _answer_in(error: BaseException | None) -> tuple[int, str] | None:
    """Find a store's answer in an exception, as status and code."""
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            # Azure's code, where it is one.
            return value, str(getattr(error, "error_code", None) or "")
    return None
