"""From botocore's exceptions to the error tree, in one place.

The foreign exception is not chained: it may repeat what the store said, the key id among it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore import exceptions  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

from tierfall.backends.object.responses import KEYS_HINT, answer_error, silence_error
from tierfall.backends.s3.connections import NoAnswerError
from tierfall.core.types.errors import AccessDeniedError, BackendError, TierfallError

_NO_LOGIN = (
    exceptions.SSOError,
    exceptions.TokenRetrievalError,
    exceptions.PartialCredentialsError,
)
# Of botocore's own connections, and of services that hand out credentials. RuntimeError: credentials that were just
# renewed have expired.
_NO_ANSWER = (
    exceptions.HTTPClientError,
    exceptions.IncompleteReadError,
    exceptions.CredentialRetrievalError,
    exceptions.MetadataRetrievalError,
    RuntimeError,
)
# Requests that credentials come from.
_LOGINS = ("AssumeRole", "GetRoleCredentials", "CreateToken", "CreateOAuth2Token")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise what botocore raises as a BackendError; an error of the tree passes as it is."""
    try:
        yield
    except (
        exceptions.BotoCoreError,
        exceptions.ClientError,
        NoAnswerError,
        ResponseParserError,
        RuntimeError,
        ValueError,
    ) as error:
        if isinstance(error, TierfallError):
            raise
        raise store_error(error, what) from None


def store_error(error: Exception, what: str) -> BackendError:
    """Make the error for an exception of botocore's."""
    name = type(error).__name__
    if isinstance(error, NoAnswerError):
        return silence_error(str(error), what)
    if isinstance(error, exceptions.ClientError):
        return _refusal(error, what)
    if isinstance(error, exceptions.NoCredentialsError):
        return AccessDeniedError(
            f"{what}: no credentials were found; give key and secret (or profile) under options, set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or give this machine a role; anon: true goes without"
        )
    if isinstance(error, _NO_LOGIN):
        return AccessDeniedError(
            f"{what}: the credentials are of no use: {name}; log in again (aws sso login), or {KEYS_HINT}"
        )
    if isinstance(error, _NO_ANSWER):
        return silence_error(name, what)
    if isinstance(error, ResponseParserError | ValueError):
        return BackendError(f"{what}: the store's answer is none of S3's; is this an S3 server?")
    return BackendError(f"{what}: botocore failed: {name}")


def _refusal(error: exceptions.ClientError, what: str) -> BackendError:
    """Make the error for an answer. For HEAD, which is answered without a body, the code is the status again."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    found = answer_error(int(status), "" if code.isdigit() else code, what)
    if error.operation_name.startswith(_LOGINS) and not found.retryable:
        return AccessDeniedError(
            f"{what}: {error.operation_name} gives no credentials: {code}; check the role and its token"
        )
    return found
