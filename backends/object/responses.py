"""What an object store's answers mean in the error tree, whatever library brought them.

An answer has a status and mostly a code of the store's own; everything without an answer is UnreachableError. What else
a store says is not repeated: about a signature it repeats the key id and the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tierfall.backends.object.client import BareAbsenceError, ConflictError, UploadGoneError
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)

_CODE = re.compile(r"<Code>([0-9A-Za-z.]{1,64})</Code>")

KEYS_HINT = "check the key, the secret, the token and what they may do there"

_KEYS = (AccessDeniedError, KEYS_HINT)
_REGION = (AccessDeniedError, "the region is another; set client_kwargs: {region_name: ...}")
_MAY_PASS = (UnreachableError, "nothing is known about what is stored; try again")
_FULL = (StorageFullError, "free space there, or raise the quota")
_TAKEN = (KeyExistsError, "the key is taken")

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
        "it does not say what is missing, so nothing is known about what is stored; is this the store's address?",
    ),
    408: _MAY_PASS,
    409: (ConflictError, "it is in conflict with what is there"),
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


def is_worth_a_get(error: BackendError) -> bool:
    """Say whether a GET may tell more than the answer to HEAD, which has no body: a missing bucket looks there like a
    missing object."""
    return not error.retryable or isinstance(error, BareAbsenceError)


def left_of(
    keys: Sequence[str],
    deleted: Iterable[Mapping[str, str]],
    failed: Iterable[Mapping[str, str]],
    what: str,
) -> list[str]:
    """Return the keys that S3's answer to a deletion of several does not say are gone, from its rows; raise the error
    of the first where that is all of them."""
    gone = {row.get("Key") for row in deleted}
    codes = {row.get("Key"): row.get("Code", "") for row in failed}
    gone |= {key for key, code in codes.items() if _BY_CODE.get(code) is _ABSENT}
    left = [key for key in keys if key not in gone]
    if len(left) < len(keys):
        return left
    first = next((key for key in left if key in codes), None)
    if first is None:
        raise BackendError(f"{what}: the store does not say what it deleted")
    raise answer_error(200, codes[first], f"{what}, {first!r}")


@contextmanager
def creating(publish: Publish) -> Iterator[None]:
    """Take a conflict for what it means where an object is created conditionally: that the key is taken."""
    try:
        yield
    except ConflictError as error:
        if publish is Publish.IF_ABSENT:
            raise KeyExistsError(str(error)) from None
        raise


def unsaid_error(what: str) -> UnreachableError:
    """Make the error for a good status before a body that does not say that an upload was completed."""
    return silence_error("the store did not say that it completed the upload", what)


def silence_error(reason: str, what: str) -> UnreachableError:
    """Make the error for a request that got no answer."""
    return UnreachableError(f"{what}: {reason}; nothing is known about what is stored; try again")
