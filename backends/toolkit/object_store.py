"""A store of objects as a plug-in describes it: get, put, list and delete, and uploads in parts if it has them; and the
registry of such stores, by the protocol of their addresses.

A program registers a store with ``register``. A package has an entry point of the group ``tierfall.backends``, named by
the protocol; the module that it names is imported when an address has that protocol, and registers the store.
"""

from __future__ import annotations

import errno
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    ConfigError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.text import signature_fault

Bytes = bytes | bytearray | memoryview


class ObjectStore(ABC):
    """A store of objects under keys, as a plug-in describes it. All methods may be called from several threads at once.
    A key is a text of up to 1,100 bytes in UTF-8, with '/' in it.

    A subclass sets what the store promises. ``durable``: an object that ``put`` has stored, and a deletion, survive a
    power cut. ``conditional_create``: of several ``put`` with ``if_absent``, in any processes, one stores its object.
    ``max_parallel``: calls that usefully run at once.

    A method raises a BackendError, or an exception of its library, which ``error_type`` classifies. For example::

        class Memory(ObjectStore):
            durable, conditional_create = False, False

            def __init__(self, url, *, options, read_only):
                self.objects = {}

            def get(self, key, start, end):
                data = self.objects.get(key)
                return None if data is None else (data[start:end], len(data))

            def put(self, key, data, if_absent):
                self.objects[key] = bytes(data)
                return True

            def delete(self, key):
                self.objects.pop(key, None)

            def list(self, prefix, delimiter):
                return [StoredObject(key=key, bytes=len(data)) for key, data in list(self.objects.items())]
    """

    durable: bool
    conditional_create: bool
    max_parallel: int = 4

    @abstractmethod
    def get(self, key: str, start: int, end: int) -> tuple[Bytes, int] | None:
        """Return the bytes ``start`` to ``end`` of an object, fewer if it ends before, and the length of the whole
        object; None only if the store answered that there is none. ``start`` and ``end`` may be equal."""

    @abstractmethod
    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        """Store an object atomically: a concurrent reader gets the old one or the new one, whole. With ``if_absent``,
        return False and change nothing if the key is taken; else return True. The memory of ``data`` (bytes,
        read-only) is reused after the call: keep a copy, not the view."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object. A missing one is no error."""

    @abstractmethod
    def list(self, prefix: str, delimiter: str) -> Iterable[StoredObject]:
        """Return every object whose key begins with ``prefix``, with its length in bytes, in any order. ``prefix`` is
        empty or ends in '/'. If ``delimiter`` is '/', those with another '/' after the prefix are not needed, and may
        be left out; else it is empty."""

    def error_type(self, error: Exception) -> type[BackendError]:
        """Choose the class of the error that replaces an exception of the store's library. UnreachableError: nothing is
        known of what is stored, and the call is retried. BackendError: the store refused the call for good.

        By default an OSError is UnreachableError, StorageFullError (ENOSPC, EDQUOT) or AccessDeniedError
        (PermissionError), and any other exception BackendError."""
        if not isinstance(error, OSError):
            return BackendError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageFullError
        return AccessDeniedError if isinstance(error, PermissionError) else UnreachableError

    def close(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Release the store's resources, such as connections. By default there are none."""


class MultipartStore(ObjectStore):
    """An ``ObjectStore`` that also takes an object in parts, in any order and from several threads, each of which can
    be sent again. A part has 5 MiB or more, the last one any length."""

    @abstractmethod
    def begin(self, key: str) -> str:
        """Begin an upload; return its id, which is not empty. Nothing is visible under the key before ``complete``."""

    @abstractmethod
    def put_part(self, key: str, upload: str, number: int, data: memoryview) -> str:
        """Store one part, in place of one with the same number; return a text for ``complete``. Numbers begin at 1, and
        need not be contiguous. The memory of ``data`` is reused after the call."""

    @abstractmethod
    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]]) -> None:
        """Make the object of these parts visible at once, in place of an older one. ``parts`` are number and text, by
        number."""

    @abstractmethod
    def abort(self, key: str, upload: str) -> None:
        """Remove an upload and its parts. A missing one is no error."""

    @abstractmethod
    def pending(self, prefix: str) -> Iterable[tuple[str, str]]:
        """Return the key and the id of every upload below a prefix that is neither completed nor aborted."""


def check_store(store: object) -> ObjectStore:
    """Return a plug-in's store. Raises ConfigError if it lacks a method or attribute, naming it."""
    name = type(store).__name__
    if not isinstance(store, ObjectStore):
        raise ConfigError(f"{name} is no ObjectStore; derive the class from it")
    methods = vars(ObjectStore) | (
        vars(MultipartStore) if isinstance(store, MultipartStore) else {}
    )
    for method, function in methods.items():
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        _, *parameters = inspect.signature(function).parameters
        if fault := signature_fault(getattr(store, method), f"({', '.join(parameters)})"):
            raise ConfigError(f"{name}.{method}: {fault}")
    for promise in ("durable", "conditional_create"):
        if not isinstance(getattr(store, promise, None), bool):
            raise ConfigError(
                f"{name} does not set {promise}; expected {promise} = True or False in the class"
            )
    return store


# The registry --------------------------------------------------------------------------------------

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
