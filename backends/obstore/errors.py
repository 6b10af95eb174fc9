"""From obstore's exceptions to the error tree, in one place.

The foreign exception is not chained: it repeats what the store said, the key id among it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from obstore import exceptions

from tierfall.backends.object.responses import KEYS_HINT, answer_error, code_in, silence_error
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
)

_STATUS = re.compile(r"status code: ([0-9]{3})\b")
_SILENCE = re.compile(r"Generic (S3|GCS|MicrosoftAzure) error")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise what obstore raises as a BackendError; a BackendError passes as it is."""
    try:
        yield
    except BackendError:
        raise
    except (exceptions.BaseError, OSError) as error:
        raise store_error(error, what) from None


@contextmanager
def building(what: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Raise what obstore says about a store's options, where nothing has been asked yet; never an option's value."""
    try:
        yield
    except (exceptions.BaseError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rpartition("error: ")[2]
        if any(
            isinstance(each, str) and len(each) > 3 and each in reason for each in config.values()
        ):
            reason = type(error).__name__
        raise BackendError(f"{what}: obstore does not take these options: {reason}") from None


def store_error(error: Exception, what: str) -> BackendError:
    """Make the error for an exception of obstore's."""
    text = str(error).split("\n\nDebug source:")[0]
    status = _STATUS.search(text)
    if status:
        return answer_error(int(status.group(1)), code_in(text), what)
    if isinstance(error, FileNotFoundError):
        return KeyNotFoundError(f"{what}: there is no such object")
    if isinstance(error, exceptions.AlreadyExistsError):
        return KeyExistsError(f"{what}: the key is taken")
    if isinstance(
        error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError
    ):
        return AccessDeniedError(f"{what}: not allowed; {KEYS_HINT}")
    reason = text.splitlines()[0].rpartition(" - ")[2]
    if "redirect without LOCATION" in reason:
        return answer_error(301, "", what)
    if isinstance(error, exceptions.GenericError) and _SILENCE.match(text):
        return silence_error(reason, what)
    return BackendError(f"{what}: {reason}")
