"""Backends of a user's own: by which protocol of an address they are opened.

One is registered here by its program, or brought along by a package as an entry point of the group
``tierfall.backends``, named by the protocol: what that names is imported when an address asks for it, and registers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import BackendError, ConfigError, TierfallError

GROUP = "tierfall.backends"
BUILT_IN = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")


class Open(Protocol):
    """Opens the place that an address names, with what the configuration has under ``options``; ``read_only`` asks for
    one that makes nothing where nothing is."""

    def __call__(self, url: str, *, options: Mapping[str, Any], read_only: bool) -> Backend: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that is not built in. ``remote``: it lies somewhere else, whatever happens here."""

    scheme: str
    open: Open
    remote: bool


Opener = TypeVar("Opener", bound=Callable[..., Backend])

_registered: dict[str, Registered] = {}


def register(scheme: str, *, remote: bool = False) -> Callable[[Opener], Opener]:
    """Register the function below as what opens addresses of a protocol, as in ``kv://place``.

    It is called with the address, ``options`` (a mapping, from the configuration) and ``read_only``, and returns a
    Backend (``core.contracts``) or raises a BackendError. ``remote`` says that what lies there survives the loss of the
    site; without it, it counts as a folder of this node's. Raises ConfigError for a protocol that is none, that is
    built in, or that another function has.
    """
    if not _SCHEME.match(scheme):
        raise ConfigError(f"register: {scheme!r} is no protocol; expected one such as kv")
    if scheme in BUILT_IN:
        raise ConfigError(f"register: {scheme}:// is built in; choose another protocol")

    def remember(opener: Opener) -> Opener:
        known = _registered.get(scheme)
        if known is not None and _home(known.open) != _home(opener):
            raise ConfigError(
                f"register: {scheme}:// is opened by {_home(known.open)} already; choose another protocol"
            )
        _registered[scheme] = Registered(scheme=scheme, open=opener, remote=remote)
        return opener

    return remember


def find(scheme: str) -> Registered | None:
    """Return what opens addresses of a protocol, or None. Raises ConfigError, which names the plug-in, where one cannot
    be loaded, or registers nothing for it."""
    found = _registered.get(scheme)
    if found is not None or scheme in BUILT_IN:
        return found
    for point in entry_points(group=GROUP, name=scheme):
        package = f" of {point.dist.name}" if point.dist is not None else ""
        what = f"{scheme}://: the plug-in {point.value}{package}"
        try:
            point.load()
        except Exception as error:
            raise ConfigError(
                f"{what} could not be loaded: {error!r}; mend or uninstall it"
            ) from error
        if scheme not in _registered:
            raise ConfigError(
                f'{what} was loaded and registers no such protocol; expected @tierfall.backends.register("{scheme}")'
            )
    return _registered.get(scheme)


def open_by(found: Registered, url: str, *, options: Mapping[str, Any], read_only: bool) -> Backend:
    """Open a place by what is registered for it; what that raises of its own becomes a BackendError."""
    try:
        return found.open(url, options=options, read_only=read_only)
    except TierfallError:
        raise
    except Exception as error:
        raise BackendError(f"open {found.scheme}://: its backend failed: {error!r}") from error


def _home(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
