"""The registry of backends that are not built in, by the protocol of their addresses.

A program registers a backend with ``register``. A package has an entry point of the group ``tierfall.backends``, named
by the protocol; the module that it names is imported when an address has that protocol, and registers the backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from tierfall.backends.toolkit.object_store import ObjectStore, check_store
from tierfall.core.types.errors import BackendError, ConfigError, TierfallError
from tierfall.core.types.text import signature_fault

GROUP = "tierfall.backends"
BUILT_IN = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")


class Open(Protocol):
    """Opens the place of an address. ``options`` is the mapping of that name in the tier's configuration;
    ``read_only``: nothing may be created or changed there."""

    def __call__(self, url: str, *, options: Mapping[str, Any], read_only: bool) -> ObjectStore: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that is not built in. ``remote``: it survives the loss of this site."""

    scheme: str
    open: Open
    remote: bool


Opener = TypeVar("Opener", bound=Callable[..., ObjectStore])

_registered: dict[str, Registered] = {}


def register(scheme: str, *, remote: bool = False) -> Callable[[Opener], Opener]:
    """Register the decorated ``ObjectStore``, whose place is an address of a protocol, such as ``kv://place``; or a
    function that returns one.

    It is called with the address (which has no credential), ``options`` (a mapping, from the tier's configuration) and
    ``read_only`` (True: create nothing), and may raise a BackendError. ``remote``: objects there survive the loss of
    the site; by default they are treated as objects in a folder of this node.

    Raises ConfigError for an invalid or built-in protocol or that of another function, for a function with other
    parameters, and for a class that lacks a method.
    """
    if not _SCHEME.match(scheme):
        raise ConfigError(f"register: {scheme!r} is no protocol; expected one such as kv")
    if scheme in BUILT_IN:
        raise ConfigError(f"register: {scheme}:// is built in; choose another protocol")

    def add(opener: Opener) -> Opener:
        known = _registered.get(scheme)
        if known is not None and _full_name(known.open) != _full_name(opener):
            raise ConfigError(
                f"register: {scheme}:// is opened by {_full_name(known.open)} already; choose another protocol"
            )
        if missing := ", ".join(sorted(getattr(opener, "__abstractmethods__", ()))):
            raise ConfigError(
                f"register: {scheme}://: {_full_name(opener)} lacks {missing}; an ObjectStore has "
                "get(key, start, end), put(key, data, if_absent), delete(key) and list(prefix, delimiter)"
            )
        if fault := signature_fault(opener, "(url, *, options, read_only)"):
            raise ConfigError(f"register: {scheme}://: {_full_name(opener)}: {fault}")
        _registered[scheme] = Registered(scheme=scheme, open=opener, remote=remote)
        return opener

    return add


def find(scheme: str) -> Registered | None:
    """Return the backend that is registered for a protocol, or None. Raises ConfigError, which names the plug-in, if it
    cannot be loaded or does not register the protocol."""
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
                f"{what} could not be loaded: {error!r}; repair or uninstall it"
            ) from error
        if scheme not in _registered:
            raise ConfigError(
                f'{what} was loaded and registers no such protocol; expected @tierfall.backends.register("{scheme}")'
            )
    return _registered.get(scheme)


def open_by(
    found: Registered, url: str, *, options: Mapping[str, Any], read_only: bool
) -> ObjectStore:
    """Open a place with a registered store. A foreign exception is raised as BackendError. Raises ConfigError, which
    names what is missing, if the result is no ``ObjectStore``."""
    what = f"open {found.scheme}://"
    try:
        opened = found.open(url, options=options, read_only=read_only)
    except TierfallError:
        raise
    except Exception as error:
        raise BackendError(f"{what}: its backend failed: {error!r}") from error
    try:
        return check_store(opened)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error} (docs/write-a-backend.md)") from None


def _full_name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
