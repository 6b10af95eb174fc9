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

from tierfall.backends.toolkit.key_value import KeyValueBackend
from tierfall.backends.toolkit.store import KeyValueStore
from tierfall.core.types.backend import Backend, backend_fault
from tierfall.core.types.errors import BackendError, ConfigError, TierfallError
from tierfall.core.types.text import signature_fault

GROUP = "tierfall.backends"
BUILT_IN = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")


class Open(Protocol):
    """Opens the place that an address names, with what the configuration has under ``options``; ``read_only`` asks for
    one that makes nothing where nothing is."""

    def __call__(
        self, url: str, *, options: Mapping[str, Any], read_only: bool
    ) -> Backend | KeyValueStore: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that is not built in. ``remote``: it lies somewhere else, whatever happens here."""

    scheme: str
    open: Open
    remote: bool


Opener = TypeVar("Opener", bound=Callable[..., Backend | KeyValueStore])

_registered: dict[str, Registered] = {}


def register(scheme: str, *, remote: bool = False) -> Callable[[Opener], Opener]:
    """Register the function or the class below as what opens addresses of a protocol, as in ``kv://place``.

    It is called with the address (which holds no credential), ``options`` (a mapping, from the tier's configuration)
    and ``read_only`` (True: make nothing where nothing is). It returns a ``Backend`` or a ``KeyValueStore``, which a
    ``KeyValueBackend`` is put around, or raises a BackendError. ``remote`` says that what lies there survives the loss
    of the site; without it, it counts as a folder of this node's.

    Raises ConfigError for a protocol that is none, that is built in or that another function has, for a function that
    does not take these arguments, and for a class that lacks a method.
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
        if missing := ", ".join(sorted(getattr(opener, "__abstractmethods__", ()))):
            raise ConfigError(
                f"register: {scheme}://: {_home(opener)} lacks {missing}; a KeyValueStore has get(key), "
                "put(key, value, if_absent), delete(key) and list(prefix)"
            )
        if fault := signature_fault(opener, "(url, *, options, read_only)"):
            raise ConfigError(f"register: {scheme}://: {_home(opener)}: {fault}")
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
    """Open a place by what is registered for it. What that raises of its own becomes a BackendError; where it returns
    no backend, ConfigError says what is missing."""
    what = f"open {found.scheme}://"
    try:
        opened = found.open(url, options=options, read_only=read_only)
    except TierfallError:
        raise
    except Exception as error:
        raise BackendError(f"{what}: its backend failed: {error!r}") from error
    if isinstance(opened, KeyValueStore):
        return KeyValueBackend(opened, place=url, read_only=read_only)
    if fault := backend_fault(opened):
        raise ConfigError(
            f"{what}: {_home(found.open)} returned {type(opened).__name__}, which is no backend: {fault} "
            "(docs/write-a-backend.md)"
        )
    return opened


def _home(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
