"""From an address and fsspec's option names to obstore's stores.

``s3://bucket/prefix`` takes s3fs's names: key, secret, token, anon, endpoint_url, client_kwargs
(region_name, endpoint_url, verify) and config_kwargs (connect_timeout, read_timeout, s3: addressing_style).
What is not given obstore looks for in the environment (AWS_*), at a metadata service and in a role. ``gs://`` and
``az://`` stand in ``obstore_clouds``. ``memory://`` takes none; it is for tests. ``file://`` is not served: obstore's
deletes and lookups fail on a folder of the key's name, and it takes no name near 255 bytes; folders have a backend of
their own. An option that is not known is an error, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.store import MemoryStore, S3Store

from tierfall.backends.object.client import NotServedError
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.obstore.errors import building
from tierfall.backends.obstore.gcs_azure import (
    AZURE,
    GOOGLE,
    NO_RETRIES,
    RETRIES,
    check_taken,
    open_azure,
    open_google,
    taken_dict,
)
from tierfall.backends.obstore.signing import sign_by_obstore
from tierfall.backends.s3.connections import Lines, Timeouts
from tierfall.backends.s3.deletions import S3Deletions
from tierfall.backends.s3.listing import Listing
from tierfall.backends.s3.multipart import Multipart
from tierfall.backends.s3.ranges import Ranges
from tierfall.backends.s3.signing import Keys, Sign, sign_with
from tierfall.backends.toolkit.keys import place_below
from tierfall.core.types.errors import BackendError


def open_client(url: str, options: Mapping[str, Any] | None = None) -> ObstoreClient:
    """Make the client; nothing is asked of the store yet.

    Raises NotServedError for a protocol or an option's name that obstore has none for, and BackendError naming what
    else is wrong.
    """
    # Taken literally, as fsspec does: '#' and '%' are letters of a key.
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    given = dict(options or {})
    if scheme == "s3":
        return _open_s3(bucket, path, given)
    if scheme in GOOGLE:
        return open_google(bucket, path, given)
    if scheme in AZURE:
        return open_azure(bucket, path, given)
    if scheme != "memory":
        raise NotServedError(f"{scheme}:// is not known to obstore")
    check_taken(given, "memory://")
    store = MemoryStore()
    return ObstoreClient(
        place="memory://", prefix="", durable=False, store=store, streams=store, uploads=None
    )


def _open_s3(bucket: str, path: str, options: dict[str, Any]) -> ObstoreClient:
    if not bucket or "@" in bucket or ":" in bucket:
        raise BackendError("the address names no bucket; expected s3://bucket/prefix")
    place, prefix = place_below(f"s3://{bucket}", path)
    config, timeouts, verify = _translate(options, place)
    with building(f"open {place}", config):
        address, region = _address(bucket, config)
        # Whoever names an http:// address, here or in the environment, means it.
        config["client_options"]["allow_http"] = address.startswith("http://")
        store = S3Store(bucket, retry_config=NO_RETRIES, **config)
        streams = S3Store(bucket, retry_config=RETRIES, **config)
    _checked_endpoint(address, place)
    sign = _signer(config, region)
    lines = Lines(address, timeouts=timeouts, verify=verify)
    return ObstoreClient(
        place=place,
        prefix=prefix,
        durable=True,
        store=store,
        streams=streams,
        uploads=Multipart(lines, sign),
        ranges=Ranges(lines, sign),
        listing=Listing(lines, sign),
        deletions=S3Deletions(lines, sign),
    )


def _translate(options: dict[str, Any], place: str) -> tuple[dict[str, Any], Timeouts, bool]:
    client = taken_dict(options, "client_kwargs", place)
    more = taken_dict(options, "config_kwargs", place)
    addressing = taken_dict(more, "s3", place)
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
        "skip_signature": bool(options.pop("anon", False)) or _is_unsigned() or None,
        "virtual_hosted_style_request": True if style == "virtual" else None,
        # One DELETE for one object: not every store knows the call for many.
        "disable_bulk_delete": True,
    }
    check_taken([*options, *client, *more, *addressing], f"open {place}")
    if endpoint is not None:
        config["endpoint"] = config["aws_endpoint_url_s3"] = _checked_endpoint(endpoint, place)
    config["client_options"] = {
        "allow_invalid_certificates": not verify,
        "connect_timeout": timedelta(seconds=timeouts.connect_s),
        "timeout": timedelta(seconds=timeouts.request_s),
    }
    given = {name: value for name, value in config.items() if value is not None}
    return given, timeouts, verify


def _checked_endpoint(endpoint: Any, place: str) -> str:
    parts = urlsplit(str(endpoint))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise BackendError(f"open {place}: endpoint_url must be http(s)://host[:port]")
    if parts.username is not None or parts.password is not None:
        raise BackendError(f"open {place}: no credentials in endpoint_url; use key and secret")
    return str(endpoint).rstrip("/")


def _signer(config: dict[str, Any], region: str) -> Sign:
    if config.get("skip_signature"):
        return lambda method, url, what: url
    key, secret = config.get("access_key_id"), config.get("secret_access_key")
    if key and secret:
        keys = Keys(
            key=str(key),
            secret=str(secret),
            token=config.get("session_token"),
            region=region,
        )
        return lambda method, url, what: sign_with(keys, method, url)
    return partial(sign_by_obstore, {**config, "retry_config": NO_RETRIES})


def _is_unsigned() -> bool:
    """Say whether the environment tells obstore to sign nothing; obstore does not say what it found there."""
    word = os.environ.get("AWS_SKIP_SIGNATURE", "")
    return word.strip().lower() in ("1", "true", "on", "yes", "y")


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
