"""From ``s3://bucket/prefix`` and s3fs's option names to a client.

They are key (username), secret (password), token, anon, profile, endpoint_url, use_ssl, requester_pays,
s3_additional_kwargs (further parameters of requests), client_kwargs (what botocore's ``create_client`` takes) and
config_kwargs (what botocore's ``Config`` takes). What is not given botocore looks for: in the environment, in the files
below ~/.aws, in SSO, at the metadata services of containers and instances, by web identity. An option that is not known
is an error, never ignored.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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

from tierfall.backends.s3.client import S3Client
from tierfall.backends.s3.connections import Connections, tls_context
from tierfall.backends.s3.errors import translated
from tierfall.backends.toolkit.keys import place_below
from tierfall.core.types.errors import ConfigError, TierfallError

# One try, because wrappers repeat; no checksums that stores other than Amazon's may not know; no wait without end.
_DEFAULTS = {
    "connect_timeout": 5.0,
    "read_timeout": 120.0,
    "max_pool_connections": 16,
    "retries": {"total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
# Of requests for credentials (STS, SSO): botocore's own bounds are five tries of a minute.
_LOGIN = {"connect_timeout": 5.0, "read_timeout": 10.0, "retries": {"total_max_attempts": 2}}
# botocore ignores what it does not know there.
_S3_NAMES = frozenset(
    ("addressing_style", "payload_signing_enabled", "us_east_1_regional_endpoint", "use_accelerate_endpoint")
    + ("use_arn_region", "use_dualstack_endpoint")
)  # fmt: skip
# Options of s3fs for files and caches of its own: nothing here has these.
_WITHOUT_EFFECT = frozenset(
    ("cache_regions", "default_block_size", "default_cache_type", "default_fill_cache", "fixed_upload_size")
    + ("max_concurrency", "skip_instance_cache", "use_listings_cache")
)  # fmt: skip
_VARIABLES: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("region_name", "AWS_REGION", frozenset()),
    ("endpoint_url", "AWS_ENDPOINT", frozenset(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))),
)
# Errors of configuration, whose text holds no secret.
_WRONG = (
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    InvalidRetryConfigurationError,
    InvalidRetryModeError,
    InvalidS3AddressingStyleError,
    ProfileNotFound,
)
_UNKNOWN_NAME = re.compile(r"unexpected keyword argument '(\w+)'")


def open_client(url: str, options: Mapping[str, Any] | None = None) -> S3Client:
    """Make the client; nothing is asked of the store yet, only of services that give credentials.

    Raises ConfigError naming what is wrong with address or options, and a BackendError where credentials cannot be had.
    """
    # Taken literally: '#' and '%' are letters of a key.
    bucket, _, path = url.partition("://")[2].partition("/")
    if not url.startswith("s3://") or not bucket or "@" in bucket or ":" in bucket:
        raise ConfigError("the address names no bucket; expected s3://bucket/prefix")
    place, prefix = place_below(f"s3://{bucket}", path)
    what = f"open {place}"
    given = dict(options or {})
    extra = _taken_dict(given, "s3_additional_kwargs", what)
    if given.pop("requester_pays", False):
        extra["RequestPayer"] = "requester"
    with translated(what), _refusing(what):
        config = _config(given, what)
        session = _session(given.pop("profile", None))
        words = _client_words(given, what)
        service, parts = (
            session.create_client("s3", config=each, **words)
            # A part is too large to be hashed for its signature.
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
    """Take what botocore's ``Config`` takes out of the options."""
    given = _taken_dict(options, "config_kwargs", what)
    s3 = _taken_dict(given, "s3", what)
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
    """Return the configuration with these below its own words for S3."""
    return config.merge(Config(s3={**s3, **(config.s3 or {})}))


def _session(profile: str | None) -> Session:
    # At level DEBUG botocore logs requests with tokens, and the answers that credentials come in.
    if not logging.getLogger("botocore").level:
        logging.getLogger("botocore").setLevel(logging.INFO)
    session = Session(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.set_default_client_config(Config(**_LOGIN))
    # Nobody looks at the times in a listing, and to read them takes longer than all else in it.
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    """What botocore reads its description of S3 by, and keeps it: reading takes a tenth of a second."""
    return create_loader(data_path)


def _client_words(options: dict[str, Any], what: str) -> dict[str, Any]:
    """Return what ``create_client`` is to be called with; nothing may be left of the options."""
    words = _taken_dict(options, "client_kwargs", what)
    found = {
        "aws_access_key_id": _one_of(options, "key", "username", what),
        "aws_secret_access_key": _one_of(options, "secret", "password", what),
        "aws_session_token": options.pop("token", None),
        "endpoint_url": options.pop("endpoint_url", None),
        "use_ssl": options.pop("use_ssl", None),
    }
    words |= {
        name: value for name, value in found.items() if value is not None and name not in words
    }
    # Variables that other libraries read, and botocore does not.
    for name, variable, botocores in _VARIABLES:
        if not words.get(name) and os.environ.get(variable) and not botocores & os.environ.keys():
            words[name] = os.environ[variable]
    if words.get("endpoint_url"):
        words["endpoint_url"] = _checked_endpoint(words["endpoint_url"], what)
    unknown = ", ".join(sorted(options.keys() - _WITHOUT_EFFECT))
    if unknown:
        raise ConfigError(
            f"{what}: unknown options {unknown}; docs/object-stores.md lists those of s3://"
        )
    return words


def _one_of(options: dict[str, Any], name: str, alias: str, what: str) -> Any:
    values = [
        each for each in (options.pop(name, None), options.pop(alias, None)) if each is not None
    ]
    if len(values) > 1:
        raise ConfigError(f"{what}: {name} and {alias} are the same option; give one")
    return values[0] if values else None


def _taken_dict(options: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """Take an option that is a mapping out of the options."""
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
    """Return our own connections; None where only botocore's know the way: through a proxy, or with a certificate."""
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
def _refusing(what: str) -> Iterator[None]:
    """Raise what botocore says about options and files of configuration as a ConfigError that shows no value."""
    try:
        yield
    except (TypeError, ValueError, OSError, ConfigError, *_WRONG) as error:
        if isinstance(error, TierfallError):
            raise
        word = _UNKNOWN_NAME.search(str(error))
        reason = (
            f"{word.group(1)} is unknown"
            if word
            else str(error)
            if isinstance(error, _WRONG)
            else type(error).__name__
        )
        raise ConfigError(f"{what}: botocore does not take these options: {reason}") from None
