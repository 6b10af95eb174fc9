"""The classification of an object store's answers, and of the exceptions of every library, as errors.

An answer has a status and usually a code. A request without an answer is UnreachableError. An exception is classified
by its class, errno, status and code only. The rest of its text is not repeated in messages: an answer about a signature
contains the key id and the request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

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
# Class names of aiohttp, botocore, azure and google.auth for a request without an answer, or for credentials that could
# not be fetched; the classes are not imported.
_SILENT = {
    *("ClientError", "ConnectionError", "HTTPClientError", "IncompleteRead", "IncompleteReadError"),
    *("ServiceRequestError", "ServiceResponseError", "TransportError", "RefreshError"),
    *("CredentialRetrievalError", "MetadataRetrievalError"),
}
# And for credentials that are missing or of no use.
_LOG_IN = f"the credentials are of no use; log in again (aws sso login), or {KEYS_HINT}"
_NO_LOGIN = {
    "NoCredentialsError": "no credentials were found; give key and secret (or profile) under options, set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role; anon: true uses none",
    **dict.fromkeys(("PartialCredentialsError", "SSOError", "TokenRetrievalError"), _LOG_IN),
    **dict.fromkeys(
        ("ClientAuthenticationError", "DefaultCredentialsError"), f"not allowed; {KEYS_HINT}"
    ),
}
# botocore's requests for credentials.
_LOGINS = ("AssumeRole", "GetRoleCredentials", "CreateToken", "CreateOAuth2Token")
# gcsfs raises an OSError without a status for an answer of 403.
_FORBIDDEN = "Forbidden: "
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
def translating(what: str, make_error: Callable[[Exception, str], BackendError]) -> Iterator[None]:
    """Raise a library's exceptions as BackendErrors; an error of this package passes as it is. The exception is not
    chained, since its text may contain the request with the key id."""
    try:
        yield
    except TierfallError:
        raise
    except Exception as error:  # noqa: BLE001 - each library raises other classes
        raise make_error(error, what) from None


def library_error(error: Exception, what: str) -> BackendError:
    """Classify an exception of a library."""
    # In this order: the cause of a silence may have a number that looks like a status, as aiohttp's parser has 400 for
    # a broken answer.
    for each in (error, error.__cause__):
        found = _request_error(each, what)
        if found is not None:
            return found
    if isinstance(error, FileNotFoundError):
        return KeyNotFoundError(f"{what}: there is no such object")
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return BackendError(f"{what}: a folder and an object would have the same name")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{what}: not allowed; {KEYS_HINT}")
    if isinstance(error, OSError):
        if error.errno in _NO_SPACE:
            return StorageFullError(f"{what}: no space is left; free some")
        return silence_error(_describe(error), what)
    return BackendError(f"{what}: {type(error).__name__} in the store's library")


def _request_error(error: BaseException | None, what: str) -> BackendError | None:
    """Classify an exception of a request over a network; None if it is none."""
    if error is None:
        return None
    answer = answer_in(error)
    if answer is not None:
        found = answer_error(*answer, what)
        login = getattr(error, "operation_name", "")
        if login.startswith(_LOGINS) and not found.retryable:
            return AccessDeniedError(
                f"{what}: {login} gives no credentials: {answer[1]}; check the role and its token"
            )
        return found
    names = {each.__name__ for each in type(error).__mro__}
    if names & _SILENT or isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError):
        return silence_error(_describe(error), what)
    if no_login := names & _NO_LOGIN.keys():
        return AccessDeniedError(f"{what}: {_NO_LOGIN[no_login.pop()]}")
    if type(error) is OSError and str(error).startswith(_FORBIDDEN):
        return AccessDeniedError(f"{what}: not allowed; {KEYS_HINT}")
    return None


def answer_in(error: BaseException | None) -> tuple[int, str] | None:
    """Return the status and the code of a store's answer in an exception, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        # botocore's. The answer to HEAD has no body: botocore then puts the status in place of the code.
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status), "" if code.isdigit() else code
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            # error_code: of Azure's exceptions only.
            named = getattr(error, "error_code", None)
            return value, str(getattr(named, "value", named) or "")
    return None


def _describe(error: BaseException) -> str:
    """Describe why a server gave no answer, without anything that was sent, and what to look at."""
    cause = _cause(error)
    reason, hint = type(cause).__name__, ""
    match cause:
        case socket.gaierror():
            reason = str(cause.strerror)
            hint = " (a host name without an address: is endpoint_url right?)"
        case ssl.SSLCertVerificationError():
            reason = f"a certificate that is not trusted ({cause.verify_message})"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
            reason, hint = "no TLS", " (the server answers by http: is endpoint_url http://?)"
        case OSError(errno=int(number)) if not isinstance(cause, ssl.SSLError):
            reason = os.strerror(number)
    if isinstance(cause, ConnectionRefusedError):
        hint = " (no server accepts connections there: is endpoint_url right?)"
    # botocore's exceptions have the address.
    url = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url") or ""))
    server = f"{url.hostname}:{url.port}" if url.port else url.hostname
    return f"{reason} at {server}{hint}" if server else f"{reason}{hint}"


def _cause(error: BaseException) -> BaseException:
    """Return the exception that libraries have replaced by ``error``."""
    known = (getattr(error, "kwargs", {}).get("error"), error.__cause__, *error.args)
    inner = next((each for each in known if isinstance(each, BaseException)), None)
    return error if inner is None else _cause(inner)


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
