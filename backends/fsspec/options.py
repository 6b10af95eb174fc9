"""Opening a client of a fsspec filesystem by an address; options are passed to the filesystem unchanged.

Each client has its own filesystem: fsspec's cached instances share credentials and connections with other users in the
process. The directory cache is disabled, because its listings are stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]

from tierfall.backends.fsspec.client import FsspecClient
from tierfall.backends.object.responses import unknown_argument
from tierfall.core.types.errors import ConfigError

_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def open_client(url: str, options: Mapping[str, Any] | None = None) -> FsspecClient:
    """Make the client; makes no request yet.

    Raises ConfigError for a protocol that fsspec does not know, a missing package, and options that the filesystem does
    not have.
    """
    protocol = url.partition("://")[0]
    kind = _filesystem_class(protocol)
    given = dict(options or {})
    system = _filesystem(kind, protocol, {**kind._get_kwargs_from_urls(url), **given})
    return FsspecClient(system, url)


def _filesystem_class(protocol: str) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(f"{protocol}:// is not known to fsspec; is the protocol right?") from None
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else str(error)
        raise ConfigError(f"{protocol}:// needs another package: {hint}") from error


def _filesystem(kind: Any, protocol: str, options: dict[str, Any]) -> Any:
    with _options_checked(protocol):
        return kind(**{**options, "skip_instance_cache": True, "use_listings_cache": False})


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
