"""From what a store answered, or did not, to the error tree: in one place for object stores.

An answer has a status and mostly a code of S3's own; everything without an answer is UnreachableError. The foreign
exception is not chained: what a store says about a signature repeats the key id and the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from tierfall.core.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

_STATUS = re.compile(r"status code: ([0-9]{3})\b")
_CODE = re.compile(r"<Code>([0-9A-Za-z.]{1,64})</Code>")

_KEYS = (AccessDeniedError, "check the key, the secret, the token and what they may do there")
_REGION = (AccessDeniedError, "the region is another; set client_kwargs: {region_name: ...}")
_MAY_PASS = (UnreachableError, "nothing is known about what is stored; try again")
_FULL = (StorageFullError, "free space there, or raise the quota")
_TAKEN = (KeyExistsError, "the key is taken")

_BY_CODE: dict[str, tuple[type[BackendError], str]] = {
    "NoSuchBucket": (BackendError, "there is no such bucket; make it, or name another"),
    "NoSuchUpload": (BackendError, "the unfinished upload is gone; write a new object"),
    "EntityTooSmall": (BackendError, "a part that is not the last was below part_bytes_min"),
    "ExpiredToken": (AccessDeniedError, "the token has expired; renew it"),
    "InvalidToken": _KEYS,
    "RequestTimeTooSkewed": (AccessDeniedError, "this machine's clock is wrong; set it"),
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "RequestTimeout": _MAY_PASS,
    "SlowDown": _MAY_PASS,
    "InternalError": _MAY_PASS,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
}
_BY_STATUS: dict[int, tuple[type[BackendError], str]] = {
    301: _REGION,
    401: _KEYS,
    403: _KEYS,
    404: (KeyNotFoundError, "there is no such object"),
    408: _MAY_PASS,
    409: _TAKEN,
    412: _TAKEN,
    416: (BackendError, "the object ends before; it was cut short, or another was expected"),
    429: _MAY_PASS,
    501: (BackendError, "the store does not know this request"),
    507: _FULL,
}


def code_in(text: str) -> str:
    """Return S3's own error code in an answer, or ''."""
    found = _CODE.search(text)
    return found.group(1) if found else ""


def answer_error(status: int, code: str, what: str) -> BackendError:
    """Make the error for an answer; ``what`` names operation, key and place."""
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    kind, hint = found or (_MAY_PASS if status >= 500 else (BackendError, "see the store's log"))
    return kind(f"{what}: the store answered {' '.join([str(status), code]).strip()}; {hint}")


def was_answered(error: Exception) -> bool:
    """Say whether a store's answer stands behind an exception of obstore's."""
    return _STATUS.search(str(error)) is not None


def silence_error(reason: str, what: str) -> UnreachableError:
    """Make the error for a request that got no answer."""
    return UnreachableError(f"{what}: {reason}; nothing is known about what is stored; try again")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise what obstore raises as a BackendError; a BackendError passes as it is."""
    try:
        yield
    except BackendError:
        raise
    except (exceptions.BaseError, OSError) as error:
        raise store_error(error, what) from None


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
        return AccessDeniedError(f"{what}: not allowed; {_KEYS[1]}")
    reason = text.splitlines()[0].rpartition(" - ")[2]
    if "redirect without LOCATION" in reason:
        return answer_error(301, "", what)
    if isinstance(error, exceptions.GenericError) and text.startswith("Generic S3 error"):
        return silence_error(reason, what)
    return BackendError(f"{what}: {reason}")
