"""Opening a backend by a URL and fsspec's option names.

Folders have the posix backend, ``s3://`` the client on botocore, registered protocols their plug-in, and
all others fsspec, as everything has with ``driver: fsspec``. Only the library that is used is imported.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.object.client import ObjectClient, StoreClient
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit import object_store
from tierfall.backends.wrappers import RetryPolicy
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import Driver

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_AZURE = ("az", "abfs", "abfss")
_WITH_BUCKET = ("s3", "gs", "gcs", *_AZURE)
# Tries of a store at open, and the seconds after which no retry begins: a silent store must not delay a start.
_TRIES = 4
_TRIES_S = 5.0


def is_remote(url: str) -> bool:
    """Whether objects at an address survive the loss of this site."""
    scheme = url.partition("://")[0]
    found = object_store.find(scheme)
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
    """Open the place of a URL. ``options`` are fsspec's for its protocol, ``driver`` chooses the library.

    A store that does not answer is retried for a second or two. Raises ConfigError for an invalid URL, option or
    driver, or a missing package, and BackendError where the place cannot be used.
    """
    check_url(url)
    scheme, _, rest = url.partition("://")
    if scheme == "file" and driver is None:
        if options:
            names = ", ".join(sorted(options))
            raise ConfigError(f"open {place_of(url)}: a folder has no options, but got {names}")
        return PosixBackend(rest, read_only=read_only)
    retry = RetryPolicy(
        tries=_TRIES, longest_wait_s=1.0, total_s=_TRIES_S, sleep=sleep, clock=clock
    )
    found = object_store.find(scheme) if driver is None else None
    if found is not None:
        given = dict(options or {})

        def client() -> ObjectClient:
            store = object_store.open_by(found, url, options=given, read_only=read_only)
            return StoreClient(store, place=url)
    else:

        def client() -> ObjectClient:
            return _client(scheme, url, options, driver)

    return retry.run(lambda: ObjectStoreBackend(client(), read_only=read_only))


def place_of(url: str) -> str:
    """Return the URL for messages: without user, password and query."""
    found = _URL.fullmatch(url)
    if not found:
        return "(no URL)"
    scheme, rest = found.groups()
    user, bare = _split_user(rest)
    if user and ":" not in user and scheme in _AZURE:
        # On Azure it is the container, not a user: abfss://container@account.dfs.core.windows.net/prefix.
        bare = rest
    return f"{scheme}://{bare.partition('?')[0]}"


def refuse_step_path(path: str) -> None:
    """Raise ConfigError for ``tiers://RUN/step-STEP``: a checkpoint has no address."""
    if path.startswith("tiers:/"):
        raise ConfigError(
            "tiers://...: a checkpoint is not saved or loaded by a path; use the adapter of your framework "
            "(tierfall.integrations), torch.distributed.checkpoint with TierWriter and TierReader, or "
            "Checkpointer.save and restore"
        )


def check_url(url: str) -> None:
    """Raise ConfigError for an invalid URL, one without a bucket, or one with credentials. Makes no request."""
    refuse_step_path(url)
    found = _URL.fullmatch(url)
    if not found:
        raise ConfigError(
            "this is no URL; expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, "
            "or what else fsspec knows"
        )
    scheme, rest = found.groups()
    user, bare = _split_user(rest)
    place = place_of(url)
    if ":" in user:
        raise ConfigError(
            f"{place}: no user and password in a URL, and no ':' before an '@'; give user, password and port under "
            "options"
        )
    if "?" in rest:
        raise ConfigError(f"{place}: no '?' in a URL; give what comes after it under options")
    if scheme == "s3a":
        raise ConfigError(f"{place}: it is written s3://bucket/prefix")
    if scheme == "local":
        raise ConfigError(f"{place}: a folder is written file:///folder")
    if scheme == "file" and not rest.startswith("/"):
        raise ConfigError(f"{place}: a folder is absolute; expected file:///folder")
    if scheme in _WITH_BUCKET:
        _check_bucket(scheme, user, bare, place)
    elif scheme != "file" and object_store.find(scheme) is None and not _is_of_fsspec(scheme):
        raise ConfigError(
            f"{place}: {scheme}:// is not known; expected s3://, gs://, az://, file:// or the protocol of a plug-in; "
            "fsspec.available_protocols() names further ones"
        )


def _is_of_fsspec(scheme: str) -> bool:
    """Whether fsspec knows the protocol. True if fsspec is not installed: ``_client`` says what to install."""
    try:
        return scheme in importlib.import_module("fsspec").available_protocols()
    except ModuleNotFoundError:
        return True


def _check_bucket(scheme: str, user: str, bare: str, place: str) -> None:
    if user and scheme not in _AZURE:
        raise ConfigError(f"{place}: no '@' before a bucket; give credentials under options")
    bucket = bare.partition("/")[0]
    if not bucket or ":" in bucket or ("@" in bucket and scheme not in _AZURE):
        raise ConfigError(f"{place}: it names no bucket; expected {scheme}://bucket/prefix")


def _split_user(rest: str) -> tuple[str, str]:
    """Split a URL's rest into user (with password) and what follows. A ':' without an '@' before the first '/' may
    begin a password that contains a '/'."""
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
    """Import the folder of a library, and open a client by it. Raises ConfigError where the library is missing."""
    folder, library = "fsspec", "fsspec"
    if scheme == "s3" and driver is None:
        folder, library = "s3", "botocore"
    try:
        module = importlib.import_module(f"tierfall.backends.{folder}.client")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ConfigError(
            f"open {place_of(url)}: {library} is not installed; pip install 'tierfall[object]'"
        ) from error
    client: ObjectClient = module.open_client(url, options)
    return client
