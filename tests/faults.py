"""Fault injection, by script or by seed: a wrapper of a backend.

A plan is a list of ``Fault``: the operation, the keys, which of the matching calls, and what happens to them. The same
seed and the same calls give the same faults, in any order of threads with different keys.

Tierfall survives these, each by a test:

* FAIL_BEFORE and FAIL_AFTER (the work is done, the answer lost) of any call, and STALL: by a retry, or by a reported
  failure of the copy on that tier, while training continues.
* TORN_WRITE, LOST_SYNC, DISK_FULL: nothing of the object becomes visible, and older objects are unchanged.
* UNSYNCED: the object is visible, and no decision relies on it until it was rewritten, or a later start has synced its
  folder; ``cut_power`` deletes it.
* BIT_FLIP on READ or WRITE: a digest detects it, and the next copy is read.

Not survived: a medium that changes every copy of a checkpoint, or lets two conditional creates of a key succeed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from tierfall.backends.toolkit.keys import check_key
from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers import Wrapper, WriterWrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import (
    BackendError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)


class Operation(StrEnum):
    """The calls that a fault can be injected into."""

    CREATE = "create"
    WRITE = "write"
    PUBLISH = "publish"
    READ = "read"
    STAT = "stat"
    SCAN = "scan"
    DELETE = "delete"
    SYNC = "sync"


class FaultKind(StrEnum):
    """What happens to the call."""

    FAIL_BEFORE = "fail_before"
    FAIL_AFTER = "fail_after"
    TORN_WRITE = "torn_write"
    BIT_FLIP = "bit_flip"
    STALL = "stall"
    DISK_FULL = "disk_full"
    LOST_SYNC = "lost_sync"
    UNSYNCED = "unsynced"


_ONLY_FOR = {
    FaultKind.TORN_WRITE: {Operation.WRITE},
    FaultKind.BIT_FLIP: {Operation.WRITE, Operation.READ},
    FaultKind.DISK_FULL: {Operation.WRITE},
    FaultKind.LOST_SYNC: {Operation.PUBLISH},
    FaultKind.UNSYNCED: {Operation.PUBLISH},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of a plan.

    ``keys``: a shell pattern, matched against the prefix of a scan. Of the matching calls, numbered from 1, those from
    ``first`` on fail, at most ``times`` of them (None: no limit), each with probability ``chance``. ``error``: the
    class that FAIL_BEFORE, FAIL_AFTER and TORN_WRITE raise. ``after_bytes``: DISK_FULL fails every call once more than
    so many bytes were written to matching keys, whatever ``first``, ``times`` and ``chance`` are; deletions free
    nothing.
    """

    kind: FaultKind
    operation: Operation
    keys: str = "*"
    first: int = 1
    times: int | None = 1
    chance: float = 1.0
    error: type[BackendError] = UnreachableError
    after_bytes: int = 0

    def __post_init__(self) -> None:
        if self.operation not in _ONLY_FOR.get(self.kind, {self.operation}):
            raise ValueError(f"a fault {self.kind} does not apply to {self.operation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that occurred, and its key."""

    fault: Fault
    key: str


class Faulty(Wrapper):
    """Injects faults into calls to ``inner`` by a plan. ``stall`` is called with the key of a STALL, and returns at its
    end: it may wait for an event, or advance a virtual clock."""

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int,
        plan: Sequence[Fault],
        stall: Callable[[str], None] = lambda key: None,
    ) -> None:
        super().__init__(inner)
        self._seed = seed
        self._plan = tuple(plan)
        self._stall = stall
        self._lock = threading.Lock()
        self._count = [_Count() for _ in self._plan]
        self._struck: list[InjectedFault] = []
        self._unsynced: set[str] = set()
        self._has_folders = any(fault.kind is FaultKind.UNSYNCED for fault in plan)

    @property
    def traits(self) -> Traits:
        """Those of ``inner``; with ``needs_sync`` if the plan has an UNSYNCED."""
        traits = self._inner.traits
        return replace(traits, needs_sync=True) if self._has_folders else traits

    @property
    def injected(self) -> tuple[InjectedFault, ...]:
        """The faults that occurred so far, in order."""
        with self._lock:
            return tuple(self._struck)

    def stop(self) -> None:
        """Inject no more faults."""
        with self._lock:
            self._plan = ()

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        writer: Writer | None = None
        try:
            with self.inject(Operation.CREATE, key):
                writer = self._inner.create(
                    key, length=length, length_max=length_max, publish=publish
                )
                return _FaultyWriter(writer, self, key)
        except BackendError:
            if writer is not None:
                writer.abort()
            raise

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        with self.inject(Operation.READ, key) as faults:
            self._inner.read_into(key, offset, view)
            if FaultKind.BIT_FLIP in faults:
                self.flip(flat(view, writable=True), key)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Return False, so that every read is a call that a fault can be injected into."""
        return False

    def stat(self, key: str) -> StoredObject:
        with self.inject(Operation.STAT, key):
            return self._inner.stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """List ``inner``; a FAIL_AFTER raises after about half of the rows."""
        with self.inject(Operation.SCAN, prefix) as faults:
            found = list(self._inner.scan(prefix))
            yield from found[: len(found) // 2] if FaultKind.FAIL_AFTER in faults else found

    def delete(self, key: str) -> None:
        with self.inject(Operation.DELETE, key):
            self._inner.delete(key)
            self.note_published(key, synced=True)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete only the first key, so that a fault can be injected between the deletions."""
        keys = [check_key(key) for key in keys]
        self.delete(keys[0])
        return keys[1:]

    def sync(self, folder: str) -> None:
        with self.inject(Operation.SYNC, folder):
            if self._inner.traits.needs_sync:
                super().sync(folder)
            with self._lock:
                self._unsynced = {k for k in self._unsynced if k.rpartition("/")[0] != folder}

    def note_published(self, key: str, *, synced: bool) -> None:
        """Record whether an object that became visible is durable too."""
        with self._lock:
            (self._unsynced.discard if synced else self._unsynced.add)(key)

    def cut_power(self) -> tuple[str, ...]:
        """Delete the objects that were visible and not durable; return their keys."""
        with self._lock:
            lost, self._unsynced = tuple(sorted(self._unsynced)), set()
        for key in lost:
            self._inner.delete(key)
        return lost

    @contextmanager
    def inject(
        self, operation: Operation, key: str, size_bytes: int = 0
    ) -> Iterator[Mapping[FaultKind, Fault]]:
        """Inject the faults of one call around a block: stalls and failures before it, failures after it."""
        faults = self._draw(operation, key, size_bytes)
        if FaultKind.STALL in faults:
            self._stall(key)
        if FaultKind.FAIL_BEFORE in faults:
            raise self._failure(faults[FaultKind.FAIL_BEFORE], key, "before it was done")
        if FaultKind.DISK_FULL in faults:
            raise StorageFullError(f"{operation} {key!r} in {self.place}: disk full, on purpose")
        yield faults
        if FaultKind.FAIL_AFTER in faults:
            raise self._failure(faults[FaultKind.FAIL_AFTER], key, "after it was done")

    def tear(self, fault: Fault, key: str) -> BackendError:
        return self._failure(fault, key, "halfway")

    def choose(self, key: str, size: int) -> int:
        """Choose an index below ``size``, the same for the same seed, key and number of its faults so far."""
        with self._lock:
            count = sum(1 for struck in self._struck if struck.key == key)
        return random.Random(f"{self._seed}/{key}/{count}").randrange(size)

    def flip(self, data: memoryview, key: str) -> None:
        """Flip one bit of ``data``, in place."""
        if data.nbytes:
            bit = self.choose(key, data.nbytes * 8)
            data[bit // 8] ^= 1 << bit % 8

    def _failure(self, fault: Fault, key: str, when: str) -> BackendError:
        return fault.error(f"{fault.operation} {key!r} in {self.place}: failed {when}, on purpose")

    def _draw(self, operation: Operation, key: str, size_bytes: int) -> Mapping[FaultKind, Fault]:
        with self._lock:
            drawn = {
                fault.kind: fault
                for index, fault in enumerate(self._plan)
                if fault.operation is operation
                and fnmatchcase(key, fault.keys)
                and self._occurs(index, fault, key, size_bytes)
            }
            for fault in drawn.values():
                self._struck.append(InjectedFault(fault=fault, key=key))
        return drawn

    def _occurs(self, index: int, fault: Fault, key: str, size_bytes: int) -> bool:
        count = self._count[index]
        count.calls += 1
        count.bytes += size_bytes
        count.of_key[key] += 1
        if fault.kind is FaultKind.DISK_FULL:
            return count.bytes > fault.after_bytes
        if count.calls < fault.first or (fault.times is not None and count.struck >= fault.times):
            return False
        if fault.chance < 1.0:
            draw = random.Random(f"{self._seed}/{index}/{key}/{count.of_key[key]}").random()
            if draw >= fault.chance:
                return False
        count.struck += 1
        return True


class _Count:
    """The matching calls, bytes and faults of one entry of a plan so far."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.struck = 0
        self.of_key: Counter[str] = Counter()


class _FaultyWriter(WriterWrapper):
    def __init__(self, inner: Writer, faults: Faulty, key: str) -> None:
        super().__init__(inner)
        self._faults = faults
        self._key = key
        self._unanswered = False

    def write(self, offset: int, view: memoryview) -> None:
        try:
            with self._faults.inject(Operation.WRITE, self._key, view.nbytes) as faults:
                self._write(offset, flat(view), faults)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise

    def publish(self) -> None:
        """Publish. A retry after a retryable failure does not publish ``inner`` twice."""
        try:
            with self._faults.inject(Operation.PUBLISH, self._key) as faults:
                if FaultKind.LOST_SYNC in faults:
                    raise LostWriteError(
                        f"fsync {self._key!r} in {self._faults.place}: failed on purpose; the bytes count as lost, "
                        "write the object anew"
                    )
                if not self._unanswered:
                    self._inner.publish()
                self._unanswered = True
                self._faults.note_published(self._key, synced=FaultKind.UNSYNCED not in faults)
                if FaultKind.UNSYNCED in faults:
                    raise LostWriteError(
                        f"fsync of the folder of {self._key!r} in {self._faults.place}: failed on purpose; it is "
                        "visible, but may not survive a power cut: write it anew"
                    )
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise
        self._unanswered = False

    def abort(self) -> None:
        self._unanswered = False
        self._inner.abort()

    def _write(self, offset: int, data: memoryview, faults: Mapping[FaultKind, Fault]) -> None:
        if FaultKind.TORN_WRITE in faults:
            self._inner.write(offset, data[: self._faults.choose(self._key, data.nbytes + 1)])
            raise self._faults.tear(faults[FaultKind.TORN_WRITE], self._key)
        if FaultKind.BIT_FLIP in faults:
            data = memoryview(bytearray(data))
            self._faults.flip(data, self._key)
        self._inner.write(offset, data)
