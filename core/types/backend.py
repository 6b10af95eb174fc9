"""The contracts of a backend and of its writers, as far as a test can check them.

A backend stores named byte strings ("objects") under keys such as ``gpt/step-00000400-a0007/commit.json``. It knows
nothing of checkpoints. A concrete backend never retries, sleeps, throttles or logs: wrappers do (``backends/``). The
conformance suite ``tierfall.backends.conformance`` runs every promise below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

PARTS_MAX = 10_000
"""S3 and its imitations accept at most this many parts in one multipart upload."""


def part_bytes(object_bytes: int, least_bytes: int) -> int:
    """Part size in bytes for an object of up to ``object_bytes``: at least ``least_bytes``, and large enough for at
    most PARTS_MAX parts."""
    return max(least_bytes, -(-object_bytes // PARTS_MAX))


class Publish(StrEnum):
    """What ``publish`` does where the key exists. RESUME replaces, too; where the medium can, the writer continues what
    a dead process, or an aborted RESUME, has left of this key: bytes that it is given and finds are not sent again."""

    REPLACE = "replace"
    IF_ABSENT = "if_absent"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a backend can do, as data.

    ``durable``: a published object survives a power cut. ``atomic_replace``: a reader sees the old or the new
    object, never a mixture. ``conditional_create``: of several writers with ``Publish.IF_ABSENT`` exactly one
    succeeds; without this trait, ``create`` raises BackendError for IF_ABSENT. ``ordered_writes``: a writer accepts
    only ascending offsets. ``alignment_bytes``: multiple of address, offset and length at which the backend makes no
    copy of its own (1: any). ``direct_io``: bytes bypass the page cache. ``part_bytes_min``: the least length of one
    ``write`` but the last. ``max_parallel``: number of concurrent calls beyond which nothing is gained.
    ``needs_sync``: an object may be visible without being durable, if its writer failed or died during ``publish``;
    such a backend is a ``SyncedBackend``. ``cache_never_waits``: once ``read_cached`` has asked for the first view, it
    fills all of them, or raises, without waiting for the medium.
    """

    durable: bool
    atomic_replace: bool
    conditional_create: bool
    ordered_writes: bool = False
    alignment_bytes: int = 1
    direct_io: bool = False
    part_bytes_min: int = 0
    max_parallel: int = 4
    needs_sync: bool = False
    cache_never_waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object as ``scan`` or ``stat`` reports it. ``version`` changes when the object is rewritten: an ETag, or the
    modification time; '' where the medium has neither."""

    key: str
    bytes: int
    version: str = field(default="", compare=False)


class Writer(Protocol):
    """Writes one new object; nothing is visible under the key before ``publish``.

    ``write`` may be called from several threads with disjoint ranges (ascending, with the trait ``ordered_writes``).
    It keeps no reference to the view after it returns. After a retryable error the same range may be written again;
    after any other error the writer is unusable and leaves nothing behind.

    ``publish`` makes the whole object visible, and durable if the trait ``durable`` is set. Under
    ``Publish.IF_ABSENT`` it raises KeyExistsError where the key exists. After a retryable error only ``publish`` and
    ``abort`` may be called; a repeated ``publish`` completes, or raises an error that is not retryable. After such an
    error the writer is unusable: write a new object. The response to a publish may be lost after it took effect, so
    after a retryable error the object may already be visible, complete. After a failed fsync the bytes count as lost.

    ``abort``, and leaving the ``with`` without publish, leave nothing visible; both may be called twice.
    """

    def write(self, offset: int, view: memoryview) -> None:
        """Write the bytes of a view at ``offset``; an empty view is no error."""
        ...

    def find(self, offset: int, view: memoryview) -> bool:
        """Under ``Publish.RESUME``, fill a view with the bytes that an earlier writer has left at ``offset``. The
        caller verifies them, and passes them to ``write``. Return False if there are none, or they cannot be read."""
        return False

    def publish(self) -> None:
        """Make the object visible; BackendError if a byte between 0 and its end was not written."""
        ...

    def abort(self) -> None:
        """Discard what was written, or leave it to be resumed; no effect after ``publish``."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *ended: object) -> None: ...


class Backend(Protocol):
    """Stores objects under keys. All methods are thread-safe.

    Every error is a ``BackendError``. KeyNotFoundError means that the store answered that the key is absent.
    UnreachableError (or another retryable error) means that the store did not answer. A backend never reports one as
    the other. KeyNotFoundError and TruncatedError are damage where the object should be whole; after any other error
    the object counts as not read, and nothing is concluded from that.
    """

    @property
    def traits(self) -> Traits:
        """What this backend can do; constant."""
        ...

    @property
    def place(self) -> str:
        """A folder or URL for messages, without credentials."""
        ...

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        """Begin an object.

        With ``length``, space is reserved where the medium supports that, and ``publish`` raises BackendError unless
        exactly ``length`` bytes were written. ``length_max`` is an upper bound where the length is not known yet; a
        write beyond it is a BackendError. A multipart upload derives its part size from either, and each write but the
        last then has ``part_bytes`` bytes. BackendError if one is negative, or ``length`` exceeds ``length_max``."""
        ...

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; TruncatedError if the object ends before the view is full."""
        ...

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Fill consecutive views with the range ``offset`` to ``end`` if all of it is in the page cache. Return False,
        with nothing read, if it is not, or if that is unknown. Errors as for ``read_into``."""
        ...

    def stat(self, key: str) -> StoredObject:
        """Describe one object; KeyNotFoundError if the store answered that it is absent."""
        ...

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Yield every object whose key starts with ``prefix`` (empty, or ending in '/'), sorted by key. Unfinished
        objects and names that are no valid keys are omitted. An empty prefix yields nothing; a place that cannot be
        read raises, also during iteration."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object, durably if the trait ``durable`` is set. An absent key is no error."""
        ...

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """Remove as many of ``keys`` as one request accepts, at least one, in any order. Return the remaining keys.
        After an error some may have been removed, and the call may be repeated."""
        ...

    def discard_unfinished(self, prefix: str) -> int:
        """Remove unpublished objects under ``prefix``, except those of this backend's open writers; return their
        number. The caller guarantees that no other process writes there."""
        ...

    def close(self) -> None:
        """Release connections and files. No other call is in progress; only a writer's ``abort`` may follow."""
        ...


class SyncedBackend(Backend, Protocol):
    """A backend with the trait ``needs_sync``."""

    def sync(self, folder: str) -> None:
        """Make durable what is visible directly below ``folder`` (a key without its last component), whichever process
        published it. KeyNotFoundError if the folder is absent. Another BackendError means that its content may not
        survive a power cut: rewrite the objects, since a second ``sync`` may succeed although data was lost."""
        ...


def put_object(backend: Backend, key: str, data: bytes, publish: Publish = Publish.REPLACE) -> None:
    """Write and publish a whole object; raises as ``Backend.create`` and ``Writer.publish`` do."""
    with backend.create(key, length=len(data), publish=publish) as writer:
        writer.write(0, memoryview(data))
        writer.publish()


def delete_all(
    backend: Backend, keys: Sequence[str], *, before: Callable[[], None] = lambda: None
) -> None:
    """Remove objects in as few requests as the backend allows, in any order; after an error some may have been removed.
    ``before`` is called before each request and may raise to stop."""
    while keys:
        before()
        keys = backend.delete_some(keys)
