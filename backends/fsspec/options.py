"""From an address to a client through fsspec; its option names pass straight through.

Every filesystem is made anew: one that fsspec keeps for all would share credentials and connections with strangers.
Its directory cache is switched off, because it would tell what was there a while ago.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]

from tierfall.backends.fsspec.client import FsspecClient
from tierfall.core.types.errors import ConfigError

_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_UNKNOWN_WORD = re.compile(r"unexpected keyword argument '(\w+)'")


def open_client(url: str, options: Mapping[str, Any] | None = None) -> FsspecClient:
    """Make the client; nothing is asked of the store yet.

    Raises ConfigError for a protocol that fsspec does not know, for a package that is missing, and for options that
    the filesystem does not take.
    """
    protocol = url.partition("://")[0]
    kind = _filesystem_class(protocol)
    given = dict(options or {})
    system = _made(kind, protocol, {**kind._get_kwargs_from_urls(url), **given})
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


def _made(kind: Any, protocol: str, options: dict[str, Any]) -> Any:
    with _refusing(protocol):
        return kind(**{**options, "skip_instance_cache": True, "use_listings_cache": False})


@contextmanager
def _refusing(protocol: str) -> Iterator[None]:
    """Raise what a filesystem says about its options as a ConfigError that shows no value."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each filesystem has its own ways to refuse
        word = _UNKNOWN_WORD.search(str(error)) if isinstance(error, TypeError) else None
        reason = f"{word.group(1)} is unknown" if word else type(error).__name__
        raise ConfigError(
            f"fsspec's {protocol}:// does not take these options: {reason}; see its documentation"
        ) from None
