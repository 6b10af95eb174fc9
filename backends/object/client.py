"""The interface of a client of an object store, on which one backend and its writers are built; the client of a
plug-in's store; and the classification of the answers of all stores, and of the exceptions of their libraries, as
errors.

A client makes single requests and has no state but its connections. Its keys are full keys, its ``prefix`` included;
``what`` is the operation, key and place for error messages. Every error is a BackendError. A client never retries. All
methods may be called from several threads at once.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast
from urllib.parse import urlsplit

from tierfall.backends.toolkit.object_store import MultipartStore, ObjectStore
from tierfall.backends.toolkit.views import copy_bytes, flat
from tierfall.core.types.backend import Publish, StoredObject
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


class UploadGoneError(BackendError):
    """The store answered that it does not know an unfinished upload."""


class BareAbsenceError(UnreachableError):
    """The answer was 404 without a code: a proxy in front of the store may have sent it."""


class ConflictError(BackendError):
    """The answer was 409, which some stores send if a conditional create finds the key taken."""


class Stream(Protocol):
    """One object that is written in rising order; nothing is visible under its key before ``finish`` returns.

    After an error of ``write`` or ``finish``, only ``abort`` may be called.
    """

    @property
    def unfinished(self) -> str:
        """Its id in ``pending``; '' where ``pending`` does not list it."""
        ...

    def write(self, view: memoryview) -> None:
        """Write the next bytes; keeps no reference to the view."""
        ...

    def finish(self) -> None: ...

    def abort(self) -> None:
        """Remove what was written, as far as the store answers."""
        ...


class ObjectClient(ABC):
    """A place in an object store, or in what is used as one.

    ``place``: the address for messages, without a credential. ``prefix``: that of every full key, '' or ending in '/'.
    ``durable``: an object that the store has acknowledged survives a power cut. ``atomic_replace``: a reader during
    ``put`` or ``finish`` sees the old or the new object, never a mixture or none. ``supports_if_absent``: ``put`` can
    send the condition IF_ABSENT; a probe finds out whether the store obeys it. ``max_parallel``: requests that usefully
    run at once. ``keys_max``: the most keys of one ``delete_some``; 1: it lacks the call.

    An object too large for memory is uploaded in parts if the client ``takes_parts`` (``begin``, ``put_part``,
    ``complete``), in order if it ``takes_streams`` (``open_stream``); a client with neither gets every object by one
    ``put``.
    """

    place: str
    prefix: str = ""
    durable: bool
    atomic_replace: bool = True
    supports_if_absent: bool
    takes_parts: bool = False
    takes_streams: bool = False
    keys_max: int = 1
    max_parallel: int = 8

    @abstractmethod
    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        """Create an object by one request; raises KeyExistsError where IF_ABSENT finds the key taken."""

    @abstractmethod
    def head(self, key: str, what: str) -> int:
        """Return the length of an object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        """Fill the view from ``offset``; return the number of bytes read, fewer where the object ends before."""

    @abstractmethod
    def list(self, prefix: str, what: str) -> Iterable[StoredObject]:
        """List every object below a prefix by its full key, in any order."""

    @abstractmethod
    def delete(self, key: str, what: str) -> None: ...

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        """Make one request; return the keys that the store did not delete, whose objects may still exist. Raises if
        that is all of them."""
        raise NotImplementedError

    def begin(self, key: str, what: str) -> str:
        """Begin an upload, whose parts are sent in any order, each of them again if need be; return its id."""
        raise NotImplementedError

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        """Send one part (numbered from 1); return its etag."""
        raise NotImplementedError

    def parts(self, key: str, upload: str, what: str) -> Mapping[int, tuple[str, int]]:
        """Return the parts of an upload that the store has: by number, etag and bytes; none by default."""
        return {}

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        """Make the object visible. ``parts`` are number and etag, by number. Raises UploadGoneError where the store
        does not know the upload."""
        raise NotImplementedError

    def open_stream(self, key: str, most_bytes: int | None, what: str) -> Stream:
        """Begin an object of at most ``most_bytes`` (None: unknown). Makes no request yet."""
        raise NotImplementedError

    @abstractmethod
    def pending(self, prefix: str, what: str) -> Iterable[tuple[str, str]]:
        """List unfinished objects below a prefix as full key and id, as far as the store lists them."""

    @abstractmethod
    def abort(self, key: str, unfinished: str, what: str) -> None:
        """Remove an unfinished object of ``pending`` or ``begin``; a missing one is no error."""

    @abstractmethod
    def check_open(self, *, read_only: bool) -> None:
        """List the place, so that wrong credentials and a missing bucket are errors now. A missing folder is an error
        only if ``read_only``: the first write creates it."""

    @abstractmethod
    def close(self) -> None: ...


class StoreClient(ObjectClient):
    """A client of a plug-in's store, whose exceptions, and answers of another type, are raised as BackendErrors.
    ``place`` names the store in messages, such as its address, without a credential."""

    def __init__(self, store: ObjectStore, *, place: str) -> None:
        self._store = store
        self.place = place
        self.durable = store.durable
        self.supports_if_absent = store.conditional_create
        self.max_parallel = store.max_parallel
        self.takes_parts = isinstance(store, MultipartStore)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        if_absent = publish is Publish.IF_ABSENT
        with self.translated(what):
            is_new = self._store.put(key, data.toreadonly(), if_absent)
            if if_absent and not isinstance(is_new, bool):
                raise BackendError(
                    f"{what}: {self._name}.put returned {is_new!r:.40}; expected True, or False if the key is taken"
                )
        if if_absent and not is_new:
            raise KeyExistsError(f"{what}: the key is taken")

    def head(self, key: str, what: str) -> int:
        return self._get(key, 0, 0, what)[1]

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        data, _ = self._get(key, offset, offset + view.nbytes, what)
        if data.nbytes > view.nbytes:
            raise BackendError(
                f"{what}: {self._name}.get returned more bytes than it was asked for"
            )
        copy_bytes(view[: data.nbytes], data)
        return data.nbytes

    def list(self, prefix: str, what: str) -> Iterator[StoredObject]:
        folder, slash, start = prefix.rpartition("/")
        with self.translated(what):
            found = list(self._store.list(folder + slash, "/" if start else ""))
        for each in found:
            if not isinstance(each, StoredObject):
                raise BackendError(
                    f"{what}: {self._name}.list returned {each!r:.40}; expected a StoredObject(key=..., bytes=...) "
                    "for each object"
                )
            if each.key.startswith(prefix):
                yield each

    def delete(self, key: str, what: str) -> None:
        with self.translated(what):
            self._store.delete(key)

    def begin(self, key: str, what: str) -> str:
        with self.translated(what):
            return self._text(self._parts.begin(key), "begin", what)

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        with self.translated(what):
            mark = self._parts.put_part(key, upload, number, view.toreadonly())
            return self._text(mark, "put_part", what)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        with self.translated(what):
            self._parts.complete(key, upload, parts)

    def pending(self, prefix: str, what: str) -> Sequence[tuple[str, str]]:
        with self.translated(what):
            return list(self._parts.pending(prefix)) if self.takes_parts else ()

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with self.translated(what):
            self._parts.abort(key, unfinished)

    def check_open(self, *, read_only: bool) -> None:
        """Do nothing: the store was opened when it was constructed."""

    def close(self) -> None:
        with self.translated(f"close {self.place}"):
            self._store.close()

    def _get(self, key: str, start: int, end: int, what: str) -> tuple[memoryview, int]:
        with self.translated(what):
            found = self._store.get(key, start, end)
            if found is None:
                raise KeyNotFoundError(f"{what}: there is no such object")
            match found:
                case (bytes() | bytearray() | memoryview() as data, int() as length):
                    return flat(memoryview(data)), length
            raise BackendError(
                f"{what}: {self._name}.get returned {found!r:.40}; expected bytes and the object's length, or None if "
                "there is no object"
            )

    def _text(self, answer: object, call: str, what: str) -> str:
        if isinstance(answer, str) and answer:
            return answer
        raise BackendError(f"{what}: {self._name}.{call} returned {answer!r:.40}; expected a text")

    @property
    def _parts(self) -> MultipartStore:
        return cast(MultipartStore, self._store)

    @property
    def _name(self) -> str:
        return type(self._store).__name__

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise exceptions of the store's library as ``error_type`` classifies them."""
        try:
            yield
        except TierfallError:
            raise
        except Exception as error:
            raise self._store.error_type(error)(f"{what}: {error!r}") from error


# Answers, and exceptions of libraries --------------------------------------------------------------

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
        return silence_error(describe_silence(error), what)
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
        return silence_error(describe_silence(error), what)
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


def describe_silence(error: BaseException, server: str = "") -> str:
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
    server = server or (f"{url.hostname}:{url.port}" if url.port else str(url.hostname or ""))
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
