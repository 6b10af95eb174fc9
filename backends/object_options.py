"""From an address and fsspec's option names to obstore's stores.

``s3://bucket/prefix`` takes s3fs's names: key, secret, token, anon, endpoint_url, use_ssl, client_kwargs
(region_name, endpoint_url, verify, use_ssl) and config_kwargs (connect_timeout, read_timeout, s3: addressing_style).
What is not given obstore looks for in the environment (AWS_*), at a metadata service and in a role. ``memory://`` takes
none; it is for tests. ``file://`` is not served: obstore's deletes and lookups fail on a folder of the key's name, and
it takes no name near 255 bytes; folders have a backend of their own. An option that is not known is an error, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import MemoryStore, ObjectStore, S3Store

from tierfall.backends.keys import check_key
from tierfall.backends.object_errors import translated
from tierfall.backends.s3_multipart import Multipart, Timeouts
from tierfall.backends.s3_signature import Keys, Sign, sign_by_obstore, sign_with
from tierfall.core.errors import BackendError

_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where objects go: ``prefix`` (empty, or ending in '/') stands before every key."""

    url: str
    prefix: str
    store: ObjectStore = field(repr=False)
    uploads: Multipart | None = field(repr=False)


def open_site(url: str, options: Mapping[str, Any] | None = None) -> Site:
    """Make the client; nothing is asked of the store yet. Raises BackendError naming what is wrong."""
    parts = urlsplit(url)
    if parts.scheme == "s3":
        return _open_s3(parts.netloc, unquote(parts.path), dict(options or {}))
    if options:
        raise BackendError(f"{parts.scheme}:// takes no options: {', '.join(sorted(options))}")
    if parts.scheme == "memory":
        return Site(url="memory://", prefix="", store=MemoryStore(), uploads=None)
    raise BackendError(f"{parts.scheme}:// is not known here; expected s3://bucket/prefix")


def _open_s3(bucket: str, path: str, options: dict[str, Any]) -> Site:
    if not bucket or "@" in bucket or ":" in bucket:
        raise BackendError("the address names no bucket; expected s3://bucket/prefix")
    prefix = path.strip("/")
    if prefix:
        check_key(prefix)
    place = "/".join([f"s3://{bucket}", *([prefix] if prefix else [])])
    config, timeouts, verify = _translate(options, place)
    with translated(f"open {place}"):
        store = S3Store(bucket, **config)
        # Where obstore puts objects is learnt from an address that it signs: with what the environment says, too.
        address = _unsigned(store, config, bucket)
    sign = _signer(config)
    uploads = Multipart(address, sign, timeouts=timeouts, verify=verify)
    return Site(url=place, prefix=f"{prefix}/" if prefix else "", store=store, uploads=uploads)


def _translate(options: dict[str, Any], place: str) -> tuple[dict[str, Any], Timeouts, bool]:
    client = _taken_dict(options, "client_kwargs", place)
    more = _taken_dict(options, "config_kwargs", place)
    style = _taken_dict(more, "s3", place).pop("addressing_style", "path")
    verify = bool(client.pop("verify", True))
    use_ssl = bool(client.pop("use_ssl", options.pop("use_ssl", True)))
    endpoint = client.pop("endpoint_url", None) or options.pop("endpoint_url", None)
    timeouts = Timeouts(
        connect_s=float(more.pop("connect_timeout", Timeouts().connect_s)),
        request_s=float(more.pop("read_timeout", Timeouts().request_s)),
    )
    config: dict[str, Any] = {
        "access_key_id": options.pop("key", None),
        "secret_access_key": options.pop("secret", None),
        "session_token": options.pop("token", None),
        "region": client.pop("region_name", None),
        "skip_signature": bool(options.pop("anon", False)) or None,
        "virtual_hosted_style_request": True if style == "virtual" else None,
        # One DELETE for one object: not every store knows the call for many.
        "disable_bulk_delete": True,
        # Wrappers retry.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(minutes=1)},
    }
    unknown = [*options, *client, *more]
    if unknown:
        raise BackendError(f"open {place}: unknown options {', '.join(map(str, sorted(unknown)))}")
    if endpoint is not None:
        config["endpoint"] = config["aws_endpoint_url_s3"] = _checked_endpoint(endpoint, place)
    config["client_options"] = {
        "connect_timeout": timedelta(seconds=timeouts.connect_s),
        "timeout": timedelta(seconds=timeouts.request_s),
    }
    # Only what is given: what is set here hides what the environment says.
    if not verify:
        config["client_options"]["allow_invalid_certificates"] = True
    if str(endpoint or "").startswith("http://") or not use_ssl:
        config["client_options"]["allow_http"] = True
    given = {name: value for name, value in config.items() if value is not None}
    return given, timeouts, verify


def _taken_dict(options: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    value = options.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise BackendError(f"open {place}: {name} is no mapping")
    return dict(value)


def _checked_endpoint(endpoint: Any, place: str) -> str:
    parts = urlsplit(str(endpoint))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise BackendError(f"open {place}: endpoint_url must be http(s)://host[:port]")
    if parts.username is not None or parts.password is not None:
        raise BackendError(f"open {place}: no credentials in endpoint_url; use key and secret")
    return str(endpoint).rstrip("/")


def _signer(config: dict[str, Any]) -> Sign:
    if config.get("skip_signature"):
        return lambda method, url: url
    key, secret = config.get("access_key_id"), config.get("secret_access_key")
    if key and secret:
        keys = Keys(
            key=str(key),
            secret=str(secret),
            token=config.get("session_token"),
            region=str(config.get("region") or _DEFAULT_REGION),
        )
        return partial(sign_with, keys)
    return partial(sign_by_obstore, config)


def _unsigned(store: S3Store, config: dict[str, Any], bucket: str) -> str:
    """Return the address of the bucket."""
    signing = store
    if not (config.get("access_key_id") and config.get("secret_access_key")):
        # Any key will do, since only the address is looked at; a metadata service need not be asked for one.
        known = {"access_key_id": "any", "secret_access_key": "any", "session_token": "any"}
        signing = S3Store(bucket, **{**config, **known, "skip_signature": False})
    address = obstore.sign(signing, "GET", "x", timedelta(minutes=1))
    return address.partition("?")[0].removesuffix("/x")
