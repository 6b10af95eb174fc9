"""Opening a client of ``s3://bucket/prefix`` by s3fs's option names.

They are key, secret, token, anon, profile, endpoint_url, use_ssl, requester_pays,
s3_additional_kwargs (further parameters of requests), client_kwargs (the parameters of botocore's ``create_client``)
and config_kwargs (those of botocore's ``Config``). botocore looks for missing values in the environment, in the files
below ~/.aws, in SSO, at the metadata services of containers and instances, and by web identity. An unknown option is an
error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    InvalidRetryConfigurationError,
    InvalidRetryModeError,
    InvalidS3AddressingStyleError,
    ProfileNotFound,
)
from botocore.loaders import Loader, create_loader  # type: ignore[import-untyped]
from botocore.session import Session  # type: ignore[import-untyped]

from tierfall.backends.object.responses import hide_requests, unknown_argument
from tierfall.backends.s3.client import S3Client, translated
from tierfall.backends.toolkit.keys import check_key
from tierfall.core.types.errors import ConfigError, TierfallError
from tierfall.core.types.text import hint_at

# One try, because wrappers retry; no checksums that stores other than Amazon's may not support; bounded waits.
_DEFAULTS = {
    "connect_timeout": 5.0,
    "read_timeout": 120.0,
    "max_pool_connections": 64,
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
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    InvalidRetryConfigurationError,
    InvalidRetryModeError,
    InvalidS3AddressingStyleError,
    ProfileNotFound,
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
        _checked_endpoint(service.meta.endpoint_url, what)
    return S3Client(service, parts, place=place, prefix=prefix, bucket=bucket, extra=extra)


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
    if isinstance(words.get("verify"), str):
        os.stat(words["verify"])  # botocore looks for it at the first request only
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
