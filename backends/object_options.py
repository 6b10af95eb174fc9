"""From an address and fsspec's option names to obstore's stores.

``s3://bucket/prefix`` takes s3fs's names: key, secret, token, anon, endpoint_url, client_kwargs
(region_name, endpoint_url, verify) and config_kwargs (connect_timeout, read_timeout, s3: addressing_style).
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
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.store import MemoryStore, ObjectStore, S3Store

from tierfall.backends.keys import check_key
from tierfall.backends.object_errors import translated
from tierfall.backends.s3_multipart import Multipart, Timeouts
from tierfall.backends.s3_signature import Keys, Sign, sign_by_obstore, sign_with
from tierfall.core.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where objects go: ``prefix`` (empty, or ending in '/') stands before every key."""

    url: str
    prefix: str
    store: ObjectStore = field(repr=False)
    uploads: Multipart | None = field(repr=False)


def open_site(url: str, options: Mapping[str, Any] | None = None) -> Site:
    """Make the client; nothing is asked of the store yet. Raises BackendError naming what is wrong."""
    # Taken literally, as fsspec does: '?', '#' and '%' are letters of a key.
    scheme, _, rest = url.partition("://")
    if scheme == "s3":
        bucket, _, path = rest.partition("/")
        return _open_s3(bucket, path, dict(options or {}))
    if options:
        raise BackendError(f"{scheme}:// takes no options: {', '.join(sorted(options))}")
    if scheme == "memory":
        return Site(url="memory://", prefix="", store=MemoryStore(), uploads=None)
    raise BackendError(f"{scheme}:// is not known here; expected s3://bucket/prefix")


def _open_s3(bucket: str, path: str, options: dict[str, Any]) -> Site:
    if not bucket or "@" in bucket or ":" in bucket:
        raise BackendError("the address names no bucket; expected s3://bucket/prefix")
    prefix = path.strip("/")
    if prefix:
        check_key(prefix)
    place = "/".join([f"s3://{bucket}", *([prefix] if prefix else [])])
    config, timeouts, verify = _translate(options, place)
    with translated(f"open {place}"):
        address, region = _address(bucket, config)
        # Whoever names an http:// address, here or in the environment, means it.
        config["client_options"]["allow_http"] = address.startswith("http://")
        store = S3Store(bucket, **config)
    sign = _signer(config, region)
    uploads = Multipart(address, sign, timeouts=timeouts, verify=verify)
    return Site(url=place, prefix=f"{prefix}/" if prefix else "", store=store, uploads=uploads)


def _translate(options: dict[str, Any], place: str) -> tuple[dict[str, Any], Timeouts, bool]:
    client = _taken_dict(options, "client_kwargs", place)
    more = _taken_dict(options, "config_kwargs", place)
    addressing = _taken_dict(more, "s3", place)
    style = addressing.pop("addressing_style", "path")
    verify = bool(client.pop("verify", True))
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
    unknown = [*options, *client, *more, *addressing]
    if unknown:
        raise BackendError(f"open {place}: unknown options {', '.join(map(str, sorted(unknown)))}")
    if endpoint is not None:
        config["endpoint"] = config["aws_endpoint_url_s3"] = _checked_endpoint(endpoint, place)
    config["client_options"] = {
        "allow_invalid_certificates": not verify,
        "connect_timeout": timedelta(seconds=timeouts.connect_s),
        "timeout": timedelta(seconds=timeouts.request_s),
    }
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


def _signer(config: dict[str, Any], region: str) -> Sign:
    if config.get("skip_signature"):
        return lambda method, url: url
    key, secret = config.get("access_key_id"), config.get("secret_access_key")
    if key and secret:
        keys = Keys(
            key=str(key),
            secret=str(secret),
            token=config.get("session_token"),
            region=region,
        )
        return partial(sign_with, keys)
    return partial(sign_by_obstore, config)


def _address(bucket: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return where the bucket is, and its region, learnt from an address that obstore signs: it heeds the environment.

    Any keys will do, since nothing is asked there; so no metadata service is asked for others.
    """
    anyone = {"access_key_id": "any", "secret_access_key": "any", "session_token": "any"}
    store = S3Store(bucket, **{**config, **anyone, "skip_signature": False})
    signed, _, query = obstore.sign(store, "GET", "x", timedelta(minutes=1)).partition("?")
    # The scope of a signature is key/day/region/s3/aws4_request.
    region = parse_qs(query)["X-Amz-Credential"][0].split("/")[2]
    return signed.removesuffix("/x"), region
