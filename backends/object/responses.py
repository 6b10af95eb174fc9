"""The classification of an object store's answers as errors, for every library.

An answer has a status and usually a code. A request without an answer is UnreachableError. The rest of an answer's text
is not repeated in messages: an answer about a signature contains the key id and the request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierfall.backends.object.client import BareAbsenceError, ConflictError, UploadGoneError
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    TierfallError,
    TruncatedError,
    UnreachableError,
)

_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")

KEYS_HINT = "check the key, the secret, the token and what they may do there"

_KEYS = (AccessDeniedError, KEYS_HINT)
_REGION = (AccessDeniedError, "the region is another; set client_kwargs: {region_name: ...}")
_MAY_PASS = (UnreachableError, "nothing is known about what is stored; try again")
_FULL = (StorageFullError, "free space there, or raise the quota")
_TAKEN = (KeyExistsError, "the key is taken")

_ARCHIVED = (AccessDeniedError, "the object is in an archive class; restore it from there first")
_ABSENT = (KeyNotFoundError, "there is no such object")
_BUCKET = (BackendError, "there is no such bucket; make it, or name another")

_BY_CODE: dict[str, tuple[type[BackendError], str]] = {
    "NoSuchBucket": _BUCKET,
    "ContainerNotFound": _BUCKET,
    "NoSuchKey": _ABSENT,
    "NoSuchVersion": _ABSENT,
    "BlobNotFound": _ABSENT,
    "PathNotFound": _ABSENT,
    "BlobAlreadyExists": _TAKEN,
    "OperationAborted": _MAY_PASS,
    "ConditionalRequestConflict": _MAY_PASS,
    "NoSuchUpload": (UploadGoneError, "the unfinished upload is gone; write a new object"),
    "EntityTooSmall": (BackendError, "a part that is not the last was below part_bytes_min"),
    "InvalidObjectState": _ARCHIVED,
    "BlobArchived": _ARCHIVED,
    "ExpiredToken": (AccessDeniedError, "the token has expired; renew it"),
    "InvalidToken": _KEYS,
    "RequestTimeTooSkewed": (AccessDeniedError, "this machine's clock is wrong; set it"),
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "RequestTimeout": _MAY_PASS,
    "SlowDown": _MAY_PASS,
    "Throttling": _MAY_PASS,
    "InternalError": _MAY_PASS,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
}
_BY_STATUS: dict[int, tuple[type[BackendError], str]] = {
    301: _REGION,
    401: _KEYS,
    403: _KEYS,
    404: (
        BareAbsenceError,
        "without a code nothing is known about what is stored; is this the store's address?",
    ),
    408: _MAY_PASS,
    409: (ConflictError, "it is in conflict with what is there"),
    412: _TAKEN,
    416: (TruncatedError, "the object ends before; it was cut short, or another was expected"),
    429: _MAY_PASS,
    501: (BackendError, "the store does not know this request"),
    507: _FULL,
}


def hide_requests() -> None:
    """Keep requests out of the log: at level DEBUG botocore logs them with tokens, and answers with credentials. A
    level that the program has set stays."""
    if not logging.getLogger("botocore").level:
        logging.getLogger("botocore").setLevel(logging.INFO)


def answer_error(status: int, code: str, what: str) -> BackendError:
    """Make the error for an answer; ``what`` names operation, key and place."""
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    kind, hint = found or (_MAY_PASS if status >= 500 else (BackendError, "see the store's log"))
    return kind(f"{what}: the store answered {' '.join([str(status), code]).strip()}; {hint}")


@contextmanager
def translating(
    what: str,
    kinds: tuple[type[Exception], ...],
    make_error: Callable[[Exception, str], BackendError],
) -> Iterator[None]:
    """Raise a library's exceptions as BackendErrors; an error of this package passes as it is. The exception is not
    chained, since its text may contain the request with the key id."""
    try:
        yield
    except TierfallError:
        raise
    except kinds as error:
        raise make_error(error, what) from None


def unknown_argument(error: Exception) -> str | None:
    """Return the name of the option that a library's function does not have, from its TypeError."""
    found = _UNKNOWN_ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    return found.group(1) if found else None


@contextmanager
def creating(publish: Publish) -> Iterator[None]:
    """Raise a conflict under IF_ABSENT as KeyExistsError."""
    try:
        yield
    except ConflictError as error:
        if publish is Publish.IF_ABSENT:
            raise KeyExistsError(str(error)) from None
        raise


def silence_error(reason: str, what: str) -> UnreachableError:
    """Make the error for a request that got no answer."""
    return UnreachableError(f"{what}: {reason}; nothing is known about what is stored; try again")
