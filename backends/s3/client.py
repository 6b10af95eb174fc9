"""A client of S3 stores: botocore builds and signs each request and parses the answer, ``Connections`` sends it.

Each method makes one request, or one for each page of a listing, and never retries. botocore makes a second request
only where a bucket is in another region.

``open_client`` opens ``s3://bucket/prefix`` by s3fs's option names. They are key, secret, token, anon, profile,
endpoint_url, use_ssl, requester_pays, s3_additional_kwargs (further parameters of requests), client_kwargs (the
parameters of botocore's ``create_client``) and config_kwargs (those of botocore's ``Config``). botocore looks for
missing values in the environment, in the files below ~/.aws, in SSO, at the metadata services of containers and
instances, and by web identity. An unknown option is an error.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore import UNSIGNED, exceptions  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.loaders import Loader, create_loader  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
from botocore.session import Session  # type: ignore[import-untyped]

from tierfall.backends.object.client import (
    BareAbsenceError,
    ObjectClient,
    UploadGoneError,
    answer_error,
    creating,
    describe_silence,
    hide_requests,
    library_error,
    silence_error,
    translating,
    unknown_argument,
)
from tierfall.backends.s3.connections import Connections, NoAnswerError, ViewReader, tls_context
from tierfall.backends.toolkit.keys import check_key
from tierfall.core.types.backend import Publish, StoredObject
from tierfall.core.types.errors import BackendError, ConfigError, KeyNotFoundError, TierfallError
from tierfall.core.types.text import hint_at

# The root element of each answer in which missing rows mean something.
_ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "DeleteObjects": "DeleteResult",
}

# What may precede the root element's name.
_START = rb"\s*(<\?.*?\?>\s*)?<([\w.-]+:)?"
_AFTER_OBJECTS = {"ContinuationToken": "NextContinuationToken"}
_AFTER_PARTS = {"PartNumberMarker": "NextPartNumberMarker"}
_AFTER_UPLOADS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}


class S3Client(ObjectClient):
    """See ``ObjectClient``.

    ``service`` is a botocore client, ``parts`` one that does not sign bodies. With ``connections`` None, botocore's own
    are used. ``extra`` are parameters that are added to every request that has them.
    """

    durable = True
    supports_if_absent = True
    takes_parts = True
    keys_max = 1000

    def __init__(
        self,
        service: Any,
        parts: Any,
        connections: Connections | None,
        *,
        place: str,
        prefix: str,
        bucket: str,
        extra: Mapping[str, Any],
    ) -> None:
        self.place = place
        self.prefix = prefix
        self._service = service
        self._parts = parts
        self._connections = connections
        self._bucket = bucket
        self._extra = dict(extra)
        for each in (service, parts):
            each.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
            each.meta.events.register("before-parse.s3", _check_answer)
            if connections is not None:
                each.meta.events.register("before-send.s3", connections.send)
        if connections is not None:
            # If this object is garbage-collected without close().
            weakref.finalize(self, connections.close)

    def put(self, key: str, data: memoryview, publish: Publish, what: str) -> None:
        condition = {"IfNoneMatch": "*"} if publish is Publish.IF_ABSENT else {}
        with creating(publish):
            self._request("put_object", what, Key=key, Body=ViewReader(data), **condition)

    def head(self, key: str, what: str) -> int:
        try:
            return int(self._request("head_object", what, Key=key)["ContentLength"])
        except BackendError as error:
            if error.retryable and not isinstance(error, BareAbsenceError):
                raise
        # The answer to HEAD has no body, so that a missing bucket looks like a missing object. That to GET tells.
        self._request("get_object", what, Key=key)["Body"].close()
        return int(self._request("head_object", what, Key=key)["ContentLength"])

    def read_into(self, key: str, offset: int, view: memoryview, what: str) -> int:
        span = f"bytes={offset}-{offset + view.nbytes - 1}"
        answer = self._request("get_object", what, Key=key, Range=span)
        body, filled = answer["Body"], 0
        try:
            with translated(what):
                while filled < view.nbytes and (count := body.readinto(view[filled:])):
                    filled += count
                is_more = bool(body.read(1))
        finally:
            body.close()
        if is_more or (offset and answer["ResponseMetadata"]["HTTPStatusCode"] == 200):
            raise BackendError(f"{what}: the store sent more than the range asked for")
        return filled

    def list(self, prefix: str, what: str) -> Iterator[StoredObject]:
        for page in self._pages("list_objects_v2", what, _AFTER_OBJECTS, Prefix=prefix):
            for row in page.get("Contents", ()):
                if "Size" not in row:
                    raise BackendError(f"{what}: the store lists an object without its size")
                yield StoredObject(key=row["Key"], bytes=row["Size"], version=row.get("ETag", ""))

    def delete(self, key: str, what: str) -> None:
        self._request("delete_object", what, Key=key)

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        rows = [{"Key": key} for key in keys]
        answer = self._request("delete_objects", what, Delete={"Objects": rows})
        errors = {
            row.get("Key"): answer_error(200, row.get("Code", ""), f"{what}, {row.get('Key')!r}")
            for row in answer.get("Errors", ())
        }
        gone = {row.get("Key") for row in answer.get("Deleted", ())}
        gone |= {key for key, error in errors.items() if isinstance(error, KeyNotFoundError)}
        left = [key for key in keys if key not in gone]
        if len(left) < len(keys):
            return left
        unknown = BackendError(f"{what}: the store does not report what it deleted")
        raise next((errors[key] for key in left if key in errors), unknown)

    def begin(self, key: str, what: str) -> str:
        upload = self._request("create_multipart_upload", what, Key=key).get("UploadId")
        if not upload:
            raise BackendError(f"{what}: the store answered without an upload id")
        return str(upload)

    def put_part(self, key: str, upload: str, number: int, view: memoryview, what: str) -> str:
        answer = self._request(
            "upload_part",
            what,
            service=self._parts,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=ViewReader(view),
        )
        return str(answer.get("ETag", ""))

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]], what: str) -> None:
        rows = [{"PartNumber": number, "ETag": etag} for number, etag in parts]
        answer = self._request(
            "complete_multipart_upload",
            what,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": rows},
        )
        if not answer.get("ETag"):
            # botocore parses an empty body as an answer without members.
            raise silence_error("the store did not confirm that it completed the upload", what)

    def pending(self, prefix: str, what: str) -> Iterator[tuple[str, str]]:
        for page in self._pages("list_multipart_uploads", what, _AFTER_UPLOADS, Prefix=prefix):
            for row in page.get("Uploads", ()):
                yield row["Key"], row["UploadId"]

    def parts(self, key: str, upload: str, what: str) -> dict[int, tuple[str, int]]:
        pages = self._pages("list_parts", what, _AFTER_PARTS, Key=key, UploadId=upload)
        rows = (row for page in pages for row in page.get("Parts", ()))
        return {row["PartNumber"]: (row["ETag"], row["Size"]) for row in rows}

    def abort(self, key: str, unfinished: str, what: str) -> None:
        with suppress(UploadGoneError):
            self._request("abort_multipart_upload", what, Key=key, UploadId=unfinished)

    def check_open(self, *, read_only: bool) -> None:
        self._request("list_objects_v2", f"open {self.place}", Prefix=self.prefix, MaxKeys=1)

    def close(self) -> None:
        """Close the connections. Open writers may still abort, over new connections."""
        if self._connections is not None:
            self._connections.close()
        for each in (self._service, self._parts):
            each.close()

    def _pages(
        self, method: str, what: str, following: Mapping[str, str], **words: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield every page of a listing. ``following`` maps parameters of the next request to members of a page."""
        token: dict[str, str] = {}
        while True:
            page = self._request(method, what, **words, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            before, token = token, {name: page.get(key, "") for name, key in following.items()}
            if token == before or not next(iter(token.values())):
                raise BackendError(f"{what}: the store's listing does not go on")

    def _request(
        self, method: str, what: str, *, service: Any = None, **words: Any
    ) -> dict[str, Any]:
        service = service or self._service
        if self._extra:
            operation = service.meta.method_to_api_mapping[method]
            known = service.meta.service_model.operation_model(operation).input_shape.members
            words = {
                **{name: value for name, value in self._extra.items() if name in known},
                **words,
            }
        with translated(what):
            answer: dict[str, Any] = getattr(service, method)(Bucket=self._bucket, **words)
        return answer


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """S3 requires a digest of a batch deletion. Older stores do not support the one that botocore adds."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _check_answer(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raise for two kinds of answers before botocore parses them."""
    status, headers = response_dict["status_code"], response_dict["headers"]
    if status in (301, 302, 307) and "x-amz-bucket-region" not in headers:
        # botocore would ask for the bucket's region, get the same answer, and ask again without end.
        answer = {"ResponseMetadata": {"HTTPStatusCode": 301, "HTTPHeaders": {}}}
        raise exceptions.ClientError(answer, operation_model.name)
    root = _ROOTS.get(operation_model.name)
    if root is None or status >= 300:
        return
    if not re.match(_START + root.encode() + rb"[\s/>]", response_dict["body"], re.DOTALL):
        # Such as a login page, which botocore would parse as an answer without members.
        raise ValueError(f"the answer is no {root}")


def translated(what: str) -> AbstractContextManager[None]:
    """Raise botocore's exceptions as BackendErrors."""
    return translating(what, store_error)


def store_error(error: Exception, what: str) -> BackendError:
    """Classify an exception of botocore."""
    if isinstance(error, NoAnswerError):
        return silence_error(str(error), what)
    if isinstance(
        error, OSError
    ):  # of a file of credentials on this machine, say: nothing is absent or full there
        return silence_error(describe_silence(error), what)
    if isinstance(error, ResponseParserError | ValueError):
        return BackendError(f"{what}: the store's answer is none of S3's; is this an S3 server?")
    if isinstance(error, RuntimeError):  # credentials expired just after they were renewed
        return silence_error(type(error).__name__, what)
    return library_error(error, what)


# One try, because wrappers retry; no checksums that stores other than Amazon's may not support; bounded waits.
_DEFAULTS = {
    "connect_timeout": 5.0,
    "read_timeout": 120.0,
    "max_pool_connections": 16,
    "retries": {"total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
# Requests for credentials (STS, SSO): botocore's defaults are five tries of a minute.
_LOGIN = {"connect_timeout": 5.0, "read_timeout": 10.0, "retries": {"total_max_attempts": 2}}
# botocore ignores unknown names there.
_S3_NAMES = frozenset(
    ("addressing_style", "payload_signing_enabled", "us_east_1_regional_endpoint", "use_accelerate_endpoint")
    + ("use_arn_region", "use_dualstack_endpoint")
)  # fmt: skip
_NAMES = (
    ("key", "secret", "token", "anon", "profile", "endpoint_url", "use_ssl", "requester_pays", "s3_additional_kwargs")
    + ("client_kwargs", "config_kwargs")
)  # fmt: skip
# What other libraries call them.
_SAME = {
    **dict.fromkeys(("access_key", "access_key_id", "aws_access_key_id", "username"), "key"),
    **dict.fromkeys(
        ("secret_key", "secret_access_key", "aws_secret_access_key", "password"), "secret"
    ),
    **dict.fromkeys(("session_token", "aws_session_token"), "token"),
    **dict.fromkeys(("endpoint", "url", "host"), "endpoint_url"),
    **dict.fromkeys(("region", "region_name"), "client_kwargs: {region_name: ...}"),
}
# Options of s3fs for its own files and caches, which this client does not have.
_WITHOUT_EFFECT = frozenset(
    ("cache_regions", "default_block_size", "default_cache_type", "default_fill_cache", "fixed_upload_size")
    + ("max_concurrency", "skip_instance_cache", "use_listings_cache")
)  # fmt: skip
_VARIABLES: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("region_name", "AWS_REGION", frozenset()),
    ("endpoint_url", "AWS_ENDPOINT", frozenset(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))),
)
# Errors of configuration; their texts contain no secret.
_CONFIG_ERRORS = (
    exceptions.ConfigNotFound,
    exceptions.ConfigParseError,
    exceptions.InvalidConfigError,
    exceptions.InvalidRetryConfigurationError,
    exceptions.InvalidRetryModeError,
    exceptions.InvalidS3AddressingStyleError,
    exceptions.ProfileNotFound,
)


def open_client(url: str, options: Mapping[str, Any] | None = None) -> S3Client:
    """Make the client; makes no request to the store yet, only for credentials.

    Raises ConfigError for an invalid address or option, BackendError where credentials are unavailable.
    """
    # Literal: '#' and '%' are characters of a key.
    bucket, _, path = url.partition("://")[2].partition("/")
    if not url.startswith("s3://") or not bucket or "@" in bucket or ":" in bucket:
        raise ConfigError("the address names no bucket; expected s3://bucket/prefix")
    path = path.strip("/")
    prefix = f"{check_key(path)}/" if path else ""
    place = f"s3://{bucket}/{path}".rstrip("/")
    what = f"open {place}"
    given = dict(options or {})
    extra = _pop_mapping(given, "s3_additional_kwargs", what)
    if given.pop("requester_pays", False):
        extra["RequestPayer"] = "requester"
    with translated(what), _options_checked(what):
        config = _config(given, what)
        session = _session(given.pop("profile", None))
        words = _client_words(given, what)
        service, parts = (
            session.create_client("s3", config=each, **words)
            # Parts are unsigned: hashing one for its signature takes too long.
            for each in (config, _with_s3(config, {"payload_signing_enabled": False}))
        )
        endpoint = _checked_endpoint(service.meta.endpoint_url, what)
        verify = words.get("verify")
        connections = _connections(
            service.meta.config,
            endpoint,
            session.get_config_variable("ca_bundle") if verify is None else verify,
        )
    return S3Client(
        service, parts, connections, place=place, prefix=prefix, bucket=bucket, extra=extra
    )


def _config(options: dict[str, Any], what: str) -> Config:
    """Remove the options of botocore's ``Config`` from ``options``, and make it."""
    given = _pop_mapping(options, "config_kwargs", what)
    s3 = _pop_mapping(given, "s3", what)
    unknown = ", ".join(sorted(s3.keys() - _S3_NAMES))
    if unknown:
        raise ConfigError(
            f"{what}: config_kwargs: s3: {unknown} is unknown; known are {', '.join(sorted(_S3_NAMES))}"
        )
    if _is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):
        s3 = {"addressing_style": "virtual", **s3}
    if options.pop("anon", False) or _is_set("AWS_SKIP_SIGNATURE"):
        given["signature_version"] = UNSIGNED
    return _with_s3(Config(**{**_DEFAULTS, **given}), s3)


def _with_s3(config: Config, s3: Mapping[str, Any]) -> Config:
    """Add settings for S3 that the configuration does not have."""
    return config.merge(Config(s3={**s3, **(config.s3 or {})}))


def _session(profile: str | None) -> Session:
    hide_requests()
    session = Session(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.set_default_client_config(Config(**_LOGIN))
    # The times in a listing are unused, and parsing them would take longer than the rest of the listing.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    """Return the loader of botocore's description of S3, which caches it: parsing it takes 0.1 s."""
    return create_loader(data_path)


def _client_words(options: dict[str, Any], what: str) -> dict[str, Any]:
    """Remove the parameters of ``create_client`` from ``options``. Raises ConfigError where other options are left."""
    words = _pop_mapping(options, "client_kwargs", what)
    found = {
        "aws_access_key_id": options.pop("key", None),
        "aws_secret_access_key": options.pop("secret", None),
        "aws_session_token": options.pop("token", None),
        "endpoint_url": options.pop("endpoint_url", None),
        "use_ssl": options.pop("use_ssl", None),
    }
    words |= {
        name: value for name, value in found.items() if value is not None and name not in words
    }
    # Environment variables of other libraries that botocore does not read.
    for name, variable, of_botocore in _VARIABLES:
        if not words.get(name) and os.environ.get(variable) and not of_botocore & os.environ.keys():
            words[name] = os.environ[variable]
    if words.get("endpoint_url"):
        words["endpoint_url"] = _checked_endpoint(words["endpoint_url"], what)
    unknown = sorted(options.keys() - _WITHOUT_EFFECT)
    if unknown:
        same = _SAME.get(unknown[0])
        near = f'; did you mean "{same}"?' if same else hint_at(unknown[0], _NAMES)
        raise ConfigError(
            f"{what}: unknown options {', '.join(unknown)}{near or ';'} known are {', '.join(_NAMES)} "
            "(docs/object-stores.md)"
        )
    return words


def _pop_mapping(options: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """Remove an option that is a mapping, and return it; {} where it is missing."""
    value = options.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: {name} is no mapping")
    return dict(value)


def _checked_endpoint(endpoint: Any, what: str) -> str:
    parts = urlsplit(str(endpoint))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"{what}: endpoint_url must be http(s)://host[:port]")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{what}: no credentials in endpoint_url; use key and secret")
    return str(endpoint).rstrip("/")


def _connections(config: Config, endpoint: str, verify: bool | str | None) -> Connections | None:
    """Return our own connections; None where botocore's are needed: for a proxy, or with a client certificate."""
    parts = urlsplit(endpoint)
    proxies = getproxies() if config.proxies is None else config.proxies
    is_proxied = parts.scheme in proxies and not proxy_bypass(parts.hostname or "")
    if is_proxied or config.client_cert:
        return None
    verify = os.environ.get("REQUESTS_CA_BUNDLE", True) if verify is None else verify
    return Connections(
        connect_s=float(config.connect_timeout),
        read_s=float(config.read_timeout),
        tls=tls_context(verify) if parts.scheme == "https" else None,
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "on", "yes", "y")


@contextmanager
def _options_checked(what: str) -> Iterator[None]:
    """Raise botocore's exceptions about options and configuration files as a ConfigError that contains no value."""
    try:
        yield
    except TierfallError:
        raise
    except (TypeError, ValueError, OSError, *_CONFIG_ERRORS) as error:
        name = unknown_argument(error)
        if name is not None:
            reason = f"{name} is unknown"
        else:
            reason = str(error) if isinstance(error, _CONFIG_ERRORS) else type(error).__name__
        raise ConfigError(f"{what}: botocore does not accept these options: {reason}") from None
