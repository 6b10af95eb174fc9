"""From a URL and fsspec's option names to a backend, with the library that serves it best.

Folders are served by this package itself, ``s3://`` by this package with botocore, ``gs://`` and ``az://`` by obstore
where it is installed and knows every option, what was registered (``registry``) by that, and all else by fsspec. No
library is loaded that is not used.
"""

from __future__ import annotations

import importlib
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import NotServedError, ObjectClient
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit import registry
from tierfall.backends.wrappers.retry import RetryPolicy
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import Driver

logger = logging.getLogger(__name__)

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PORT = re.compile(r"[^:]*:[0-9]+")
_AZURE = ("az", "abfs", "abfss")
_WITH_BUCKET = ("s3", "gs", "gcs", *_AZURE)
# How often a store is asked at open, and for how long, so that silence does not hold up a start.
_TRIES = 4
_TRIES_S = 5.0


def is_remote(url: str) -> bool:
    """Say whether what lies at an address lies somewhere else, whatever happens here."""
    scheme = url.partition("://")[0]
    found = registry.find(scheme)
    return scheme in _WITH_BUCKET if found is None else found.remote


def open_backend(
    url: str,
    *,
    options: Mapping[str, Any] | None = None,
    driver: Driver | None = None,
    read_only: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Backend:
    """Open the place that a URL names; ``options`` are fsspec's for its protocol, ``driver`` picks the library.

    A store that does not answer is tried again over a second or two: whoever opens it does so once in a run. Raises
    ConfigError where URL, options and driver do not go together or a package is missing, and a BackendError where the
    place cannot be used.
    """
    check_url(url)
    scheme, _, rest = url.partition("://")
    if scheme == "file" and driver is None:
        if options:
            names = ", ".join(sorted(options))
            raise ConfigError(f"open {place_of(url)}: a folder takes no options, but has {names}")
        return PosixBackend(rest, read_only=read_only)
    patience = RetryPolicy(
        tries=_TRIES,
        first_wait_s=0.2,
        longest_wait_s=1.0,
        most_s=_TRIES_S,
        sleep=sleep,
        clock=clock,
        rng=random.Random(),
    )
    found = registry.find(scheme) if driver is None else None
    if found is not None:
        given = dict(options or {})
        return patience.again(
            lambda: registry.open_by(found, url, options=given, read_only=read_only)
        )
    return patience.again(
        lambda: ObjectStoreBackend(_client(scheme, url, options, driver), read_only=read_only)
    )


def place_of(url: str) -> str:
    """Return the URL as messages may show it: without user and password, and without a query."""
    found = _URL.fullmatch(url)
    if not found:
        return "(no URL)"
    scheme, rest = found.groups()
    if _is_ambiguous(rest):
        return f"{scheme}://..."
    user, bare = _split_user(rest)
    if user and ":" not in user and scheme in _AZURE:
        # There it is the container, and no user: abfss://container@account.dfs.core.windows.net/prefix.
        bare = rest
    return f"{scheme}://{bare.partition('?')[0]}"


def check_url(url: str) -> None:
    """Raise ConfigError for what is no URL, names no bucket, or carries credentials; nothing is asked of anyone."""
    found = _URL.fullmatch(url)
    if not found:
        raise ConfigError(
            "this is no URL; expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, "
            "or what else fsspec knows"
        )
    scheme, rest = found.groups()
    user, bare = _split_user(rest)
    place = place_of(url)
    if _is_ambiguous(rest):
        raise ConfigError(
            f"{place}: the '@' may end a password or stand in a path; give user, password and port under options, and "
            "name a path without '@'"
        )
    if ":" in user:
        raise ConfigError(f"{place}: no user and password in a URL; give them under options")
    if "?" in rest:
        raise ConfigError(f"{place}: no '?' in a URL; give what stands behind it under options")
    if scheme == "s3a":
        raise ConfigError(f"{place}: it is written s3://bucket/prefix")
    if scheme == "local":
        raise ConfigError(f"{place}: a folder is written file:///folder")
    if scheme == "file" and not rest.startswith("/"):
        raise ConfigError(f"{place}: a folder is absolute; expected file:///folder")
    if scheme in _WITH_BUCKET:
        _check_bucket(scheme, user, bare, place)


def _check_bucket(scheme: str, user: str, bare: str, place: str) -> None:
    if user and scheme not in _AZURE:
        raise ConfigError(f"{place}: no '@' before a bucket; give credentials under options")
    bucket = bare.partition("/")[0]
    if not bucket or ":" in bucket:
        raise ConfigError(f"{place}: it names no bucket; expected {scheme}://bucket/prefix")


def _is_ambiguous(rest: str) -> bool:
    """Say whether what looks like a port may be the start of a password that holds a '/'."""
    authority, _, path = rest.partition("/")
    return "@" not in authority and "@" in path and _PORT.fullmatch(authority) is not None


def _split_user(rest: str) -> tuple[str, str]:
    """Split off what stands before a host; a secret may hold a '/', which is where the host would seem to end."""
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        return user, host + slash + path
    if ":" in authority and "@" in path:
        user, _, bare = rest.rpartition("@")
        return user, bare
    return "", rest


def _client(
    scheme: str, url: str, options: Mapping[str, Any] | None, driver: Driver | None
) -> ObjectClient:
    if scheme == "s3":
        # One client, whatever the driver.
        return _open_by("s3", "botocore", url, options)
    if driver is Driver.FSSPEC or (driver is None and scheme not in _WITH_BUCKET):
        return _open_by("fsspec", "fsspec", url, options)
    try:
        return _open_by("obstore", "obstore", url, options)
    except (NotServedError, ConfigError) as error:
        if driver is not None:
            raise
        logger.info("%s; fsspec is used instead", error)
    return _open_by("fsspec", "fsspec", url, options)


def _open_by(
    folder: str, library: str, url: str, options: Mapping[str, Any] | None
) -> ObjectClient:
    """Load the folder that uses a library and let it make the client; an error that says what is missing is a
    ConfigError."""
    try:
        opening = importlib.import_module(f"tierfall.backends.{folder}.options")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ConfigError(
            f"open {place_of(url)}: {library} is not installed; pip install 'tierfall[object]'"
        ) from error
    client: ObjectClient = opening.open_client(url, options)
    return client
