"""Contracts between rooms: what a backend and a writer promise, as far as a test can check it.

A backend stores named byte strings ("objects") under keys such as ``gpt/step-00000400-a0007/commit.json``. It knows
nothing of checkpoints. A concrete backend never retries, sleeps, throttles or logs: wrappers do (``backends/``). The
conformance suite ``tierfall.backends.conformance`` runs every promise below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from tierfall.core.types.text import signature_fault

PARTS_MAX = 10_000
"""No store takes an object in more parts than this."""


def part_bytes(object_bytes: int, least_bytes: int) -> int:
    """Return how long the parts of an object of up to ``object_bytes`` have to be: ``least_bytes``, or what keeps their
    number within PARTS_MAX."""
    return max(least_bytes, -(-object_bytes // PARTS_MAX))


class Publish(StrEnum):
    """What ``publish`` does where the key is taken."""

    REPLACE = "replace"
    IF_ABSENT = "if_absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a backend can do, as data.

    ``durable``: a published object survives a power cut. ``atomic_replace``: a reader sees the old or the new
    object, never a mixture. ``conditional_create``: ``Publish.IF_ABSENT`` lets exactly one of several writers win;
    without it, ``create`` refuses that with a BackendError. ``ordered_writes``: a writer takes offsets in rising
    order only. ``alignment_bytes``: address, offset and length multiples for which bytes move without a copy of the
    backend's own (1: any). ``direct_io``: bytes bypass the page cache. ``part_bytes_min`` and ``part_bytes_max``
    bound one ``write`` (0: no bound). ``max_parallel``: calls that may usefully run at once. ``needs_sync``: an
    object may be visible and not durable, where its writer failed or died in the middle of ``publish``; the backend
    is a ``SyncedBackend`` then.
    """

    durable: bool
    atomic_replace: bool
    conditional_create: bool
    ordered_writes: bool = False
    alignment_bytes: int = 1
    direct_io: bool = False
    part_bytes_min: int = 0
    part_bytes_max: int = 0
    max_parallel: int = 4
    needs_sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object as a scan or a stat reports it. ``version`` is another text once the object was written anew, '' where
    the medium says no such thing: an ETag, the time of the last change."""

    key: str
    bytes: int
    version: str = field(default="", compare=False)


class Writer(Protocol):
    """Fills one new object; nothing is visible under the key before ``publish`` returned.

    ``write`` may be called from several threads with disjoint ranges (in rising order where the trait says so), keeps
    no reference to the view, and returns once the bytes are taken. After a ``write`` that failed with a retryable error
    the writer lives, and the same range may be written again; after any other failure it is dead and leaves nothing.
    ``publish`` makes the object visible whole, and durable where the trait says so; it raises KeyExistsError under
    ``Publish.IF_ABSENT`` when the key is taken. After a retryable failure of ``publish`` it may be called again, and
    nothing but that and ``abort``: it finishes, or says by an error that is not retryable that the writer is dead, as
    it is after any other failure: then write a new object. The answer to a publish may be lost after it took effect,
    so after a retryable failure the object may be visible already, whole. After a failed fsync the bytes count as
    lost. ``abort``, and leaving the ``with`` without publish, leave nothing visible; both may be called twice.
    """

    def write(self, offset: int, view: memoryview) -> None:
        """Take the bytes of a view as those from ``offset`` on; an empty view is no error."""
        ...

    def publish(self) -> None:
        """Make the object visible; BackendError where bytes are missing between 0 and its end."""
        ...

    def abort(self) -> None:
        """Leave nothing; after ``publish`` do nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Backend(Protocol):
    """A place that stores objects under keys. All methods may be called from several threads at once.

    Every error is a ``BackendError``: KeyNotFoundError only when the store answered that nothing is there, and
    UnreachableError (or another retryable one) when it could not be asked; the two are never mixed up.
    """

    @property
    def traits(self) -> Traits:
        """What this backend can do; always the same."""
        ...

    @property
    def place(self) -> str:
        """Where this is, for messages: a folder or an URL, never a credential."""
        ...

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        """Begin an object. With ``length`` given, space is reserved where the medium can, and ``publish`` raises a
        BackendError unless exactly ``length`` bytes are covered. ``length_max`` says, where the length is not known
        yet, what it will not exceed: an upload in parts chooses the size of its parts by either (a write, but for the
        last, then has as much as ``part_bytes`` says), and to write beyond it is a BackendError. A negative one, or a
        length above length_max, is a BackendError."""
        ...

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; an object that ends before the view is full raises BackendError."""
        ...

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Fill one view after the other, which together are the range up to ``end``, where the system keeps that in
        memory anyway (its page cache); False, with nothing read, where it does not, or it is not known. Errors are
        those of ``read_into``."""
        ...

    def stat(self, key: str) -> StoredObject:
        """Describe one object; KeyNotFoundError where the store has answered that it is not there."""
        ...

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with ``prefix`` (empty, or ending in '/'), sorted by key; unfinished objects
        and names that no valid key has are left out. A prefix with nothing below it yields nothing; a place that
        cannot be read raises, also in the middle of the iteration."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object, durably where the trait says so. A key that is not there is no error."""
        ...

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """Remove objects, each as ``delete`` does: of one key or more as many as one request takes, in any order.
        Return the keys that are still to be asked for, fewer than came. After an error some may be gone, and it may be
        asked again."""
        ...

    def discard_unfinished(self, prefix: str) -> int:
        """Remove what writers left under ``prefix`` without publishing, except this backend object's own living
        writers; return how many. Only for callers that know that no other process writes there."""
        ...

    def close(self) -> None:
        """Give back connections and files. No other call is going on, and none but a writer's ``abort`` follows."""
        ...


class SyncedBackend(Backend, Protocol):
    """A backend whose traits say ``needs_sync``."""

    def sync(self, folder: str) -> None:
        """Make durable what is visible directly below ``folder`` (a key's parts without the last), whoever published
        it. Raises KeyNotFoundError where the folder is not there, and another BackendError where what lies there may
        not survive a power cut: a second call may then say wrongly that all is well, so write the object anew."""
        ...


_PARAMETERS = {
    "create": "(key, *, length, length_max, publish)",
    "read_into": "(key, offset, view)",
    "read_cached": "(key, offset, end, views)",
    "stat": "(key)",
    "scan": "(prefix)",
    "delete": "(key)",
    "delete_some": "(keys)",
    "discard_unfinished": "(prefix)",
    "close": "()",
}


def backend_fault(backend: object) -> str | None:
    """Say what keeps an object from being a ``Backend``: the first method that is missing or takes other parameters, or
    a ``traits`` or ``place`` of another type. None where it is one; no method is called."""
    traits = getattr(backend, "traits", None)
    needed = _PARAMETERS | ({"sync": "(folder)"} if getattr(traits, "needs_sync", False) else {})
    for name, expected in needed.items():
        method = getattr(backend, name, None)
        if not callable(method):
            return f"it has no method {name}{expected}"
        if fault := signature_fault(method, expected):
            return f"{name}: {fault}"
    if not isinstance(traits, Traits):
        return f"its traits are {traits!r}; expected a Traits(durable=..., atomic_replace=..., conditional_create=...)"
    place = getattr(backend, "place", None)
    if not isinstance(place, str) or not place:
        return (
            f"its place is {place!r}; expected a text that messages can show, without a credential"
        )
    return None


def delete_all(
    backend: Backend, keys: Sequence[str], *, before: Callable[[], None] = lambda: None
) -> None:
    """Remove objects in as few requests as the backend makes of them, in any order; after an error some may be gone.
    ``before`` is called before each request, and ends it by raising."""
    while keys:
        before()
        keys = backend.delete_some(keys)
