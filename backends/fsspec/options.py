"""Opening a client of a fsspec filesystem by an address; options are passed to the filesystem unchanged.

Each client has its own filesystem: fsspec's cached instances share credentials and connections with other users in the
process. The directory cache is disabled, because its listings are stale.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]

from tierfall.backends.fsspec.client import STORES, FsspecClient
from tierfall.backends.object.responses import hide_requests, unknown_argument
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import hint_at

_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_NO_STORE = "a web server takes no files; a store like S3 is s3://BUCKET/PREFIX with options: {endpoint_url: ...}"
# Options of every filesystem, for its cache.
_OF_FSSPEC = {"listings_expiry_time", "max_paths", "use_listings_cache", "skip_instance_cache"}
_CONNECT_S = 5.0
_READ_S = 120.0
# As of our own client: bounded waits, and no checksums that stores other than Amazon's may not support.
_S3_CONFIG = {
    "connect_timeout": _CONNECT_S,
    "read_timeout": _READ_S,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_ONE_TRY = {"retries": {"total_max_attempts": 1}}


def open_client(url: str, options: Mapping[str, Any] | None = None) -> FsspecClient:
    """Make the client; makes no request yet.

    Raises ConfigError for a protocol that fsspec does not know, a missing package, and options that the filesystem does
    not have.
    """
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        raise ConfigError(f"{url}: {_NO_STORE}")
    kind = _filesystem_class(protocol)
    given = {**kind._get_kwargs_from_urls(url), **dict(options or {})}
    if protocol not in STORES:
        system = _filesystem(kind, protocol, given)
        return FsspecClient(system, url, streams=system)
    if protocol == "s3":
        hide_requests()
    else:
        _check_names(kind, protocol, given)
    streams = _filesystem(kind, protocol, given)
    system = _filesystem(kind, protocol, given, **_ONE_TRY)
    _try_once(protocol, system)
    return FsspecClient(system, url, streams=streams)


def _check_names(kind: Any, protocol: str, options: Collection[str]) -> None:
    """Raise ConfigError for an option that a filesystem does not have: gcsfs and adlfs ignore it."""
    known = set(_OF_FSSPEC)
    for each in kind.__mro__:
        known.update(inspect.signature(each.__init__).parameters)
    for name in sorted(options):
        if name not in known:
            raise ConfigError(
                f"{protocol}://: {_PACKAGES[protocol]} has no option {name}{hint_at(name, known)}; see its "
                "documentation"
            )


def _bounds(protocol: str, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return options that bound the wait for an answer. ``config`` is added to that of s3fs. adlfs has bounds of its
    own."""
    if protocol == "s3":
        return {"config_kwargs": {**_S3_CONFIG, **config}}
    if _PACKAGES.get(protocol) != "gcsfs":
        return {}
    import aiohttp  # It comes with gcsfs.

    bound = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    return {"session_kwargs": {"timeout": bound}}


def _try_once(protocol: str, system: Any) -> None:
    """Let a filesystem try each request once, because wrappers retry. gcsfs and adlfs have no option for it."""
    if protocol == "s3":
        system.retries = 1
    elif _PACKAGES[protocol] == "gcsfs":
        once = getattr(getattr(type(system), "_request", None), "__wrapped__", None)
        if once is not None:
            system._request = once.__get__(system)
    else:
        for policy in system.service_client._pipeline._impl_policies:
            if hasattr(policy, "total_retries"):
                policy.total_retries = 0


def _filesystem_class(protocol: str) -> Any:
    try:
        if _PACKAGES.get(protocol) == "gcsfs":
            # The class that gcsfs registers asks over gRPC what kind of bucket it is, and in some shows half an object.
            return importlib.import_module("gcsfs.core").GCSFileSystem
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(f"{protocol}:// is not known to fsspec; is the protocol right?") from None
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else str(error)
        raise ConfigError(f"{protocol}:// needs another package: {hint}") from error


def _filesystem(kind: Any, protocol: str, options: dict[str, Any], **config: Any) -> Any:
    with _options_checked(protocol):
        bounded = {
            name: {**bounds, **(options.get(name) or {})}
            for name, bounds in _bounds(protocol, config).items()
        }
        fresh = {"skip_instance_cache": True, "use_listings_cache": False}
        system = kind(**{**options, **bounded, **fresh})
        if protocol == "s3":
            # s3fs looks at its options only when it connects, which makes no request to the store.
            system.connect()
        return system


@contextmanager
def _options_checked(protocol: str) -> Iterator[None]:
    """Raise a filesystem's exceptions about its options as a ConfigError that contains no value."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each filesystem raises other classes
        name = unknown_argument(error)
        reason = f"{name} is unknown" if name else type(error).__name__
        raise ConfigError(
            f"fsspec's {protocol}:// does not accept these options: {reason}; see its documentation"
        ) from None
