"""Faults on purpose: what storage does on its worst days, by script or by seed, for tests and for drills.

A plan is a list of ``Fault``: which operation on which keys, from which matching call on and how often, and what then
happens. The same seed and the same calls give the same faults, whichever thread comes first among different keys.

Tierfall survives, each by a test:

* FAIL_BEFORE of any call, FAIL_AFTER of any call (the work was done, the answer lost), STALL: by retry, or by giving
  up the copy on that tier and saying so; training goes on.
* TORN_WRITE, LOST_SYNC, DISK_FULL: nothing of the object becomes visible, and older objects stay as they were.
* UNSYNCED: the object is visible, and nobody relies on it before it was written anew, or its folder was synced by a
  later start; ``cut_power`` takes it away.
* BIT_FLIP on READ or WRITE: a checksum finds it, and the next copy is read.

Not survived: a medium that changes every copy of a checkpoint, or that answers a conditional create twice with yes.
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
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import (
    BackendError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)


class Operation(StrEnum):
    """The calls that a fault can strike."""

    CREATE = "create"
    WRITE = "write"
    PUBLISH = "publish"
    READ = "read"
    STAT = "stat"
    SCAN = "scan"
    DELETE = "delete"
    SYNC = "sync"


class FaultKind(StrEnum):
    """What happens to a call that is struck."""

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
    """One line of a plan.

    ``keys``: a shell pattern; a scan is matched by its prefix. Of the matching calls, those from number ``first``
    (from 1) on are struck, ``times`` of them (None: for ever), each with probability ``chance``. ``error``: what
    FAIL_BEFORE, FAIL_AFTER and TORN_WRITE raise. ``after_bytes``: DISK_FULL strikes once more than so many bytes were
    written to matching keys, and from then on always, whatever ``first``, ``times`` and ``chance`` say; what is deleted
    gives none back.
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
class Struck:
    """A fault that came about, and where."""

    fault: Fault
    key: str


class Faulty(Wrapper):
    """Strikes calls to ``inner`` by plan. ``stall`` is called with the key where a STALL strikes, and decides how long
    that lasts: it may wait for an event, or advance a virtual clock."""

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
        self._struck: list[Struck] = []
        self._unsynced: set[str] = set()
        self._has_folders = any(fault.kind is FaultKind.UNSYNCED for fault in plan)

    @property
    def traits(self) -> Traits:
        """Those of ``inner``; with an UNSYNCED in the plan, objects lie in folders that need their fsync."""
        traits = self._inner.traits
        return replace(traits, needs_sync=True) if self._has_folders else traits

    @property
    def struck(self) -> tuple[Struck, ...]:
        """What came about so far, in order."""
        with self._lock:
            return tuple(self._struck)

    def heal(self) -> None:
        """Strike no more."""
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
            with self.striking(Operation.CREATE, key):
                writer = self._inner.create(
                    key, length=length, length_max=length_max, publish=publish
                )
                return _FaultyWriter(writer, self, key)
        except BackendError:
            if writer is not None:
                writer.abort()
            raise

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        with self.striking(Operation.READ, key) as faults:
            self._inner.read_into(key, offset, view)
            if FaultKind.BIT_FLIP in faults:
                self.flip(flat(view, writable=True), key)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Nothing is in the page cache: every read is one that a fault may strike."""
        return False

    def stat(self, key: str) -> StoredObject:
        with self.striking(Operation.STAT, key):
            return self._inner.stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """List what ``inner`` has; a FAIL_AFTER breaks off after about half of it was handed out."""
        with self.striking(Operation.SCAN, prefix) as faults:
            found = list(self._inner.scan(prefix))
            yield from found[: len(found) // 2] if FaultKind.FAIL_AFTER in faults else found

    def delete(self, key: str) -> None:
        with self.striking(Operation.DELETE, key):
            self._inner.delete(key)
            self.note_published(key, synced=True)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """Remove the first: each key is a deletion of its own that a fault can strike, with others gone before it."""
        keys = [check_key(key) for key in keys]
        self.delete(keys[0])
        return keys[1:]

    def sync(self, folder: str) -> None:
        with self.striking(Operation.SYNC, folder):
            if self._inner.traits.needs_sync:
                super().sync(folder)
            with self._lock:
                self._unsynced = {k for k in self._unsynced if k.rpartition("/")[0] != folder}

    def note_published(self, key: str, *, synced: bool) -> None:
        """Note whether an object that is visible now is durable, too."""
        with self._lock:
            (self._unsynced.discard if synced else self._unsynced.add)(key)

    def cut_power(self) -> tuple[str, ...]:
        """Take away what was visible and not durable; return it."""
        with self._lock:
            gone, self._unsynced = tuple(sorted(self._unsynced)), set()
        for key in gone:
            self._inner.delete(key)
        return gone

    @contextmanager
    def striking(
        self, operation: Operation, key: str, size_bytes: int = 0
    ) -> Iterator[Mapping[FaultKind, Fault]]:
        """Let the faults of one call come about around a block: stalls and failures before it, failures after it."""
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

    def place_in(self, key: str, size: int) -> int:
        """Choose a place in ``size`` things, the same for the same seed, key and number of faults so far."""
        with self._lock:
            count = sum(1 for struck in self._struck if struck.key == key)
        return random.Random(f"{self._seed}/{key}/{count}").randrange(size)

    def flip(self, data: memoryview, key: str) -> None:
        """Change one bit."""
        if data.nbytes:
            bit = self.place_in(key, data.nbytes * 8)
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
                and self._strikes(index, fault, key, size_bytes)
            }
            for fault in drawn.values():
                self._struck.append(Struck(fault=fault, key=key))
        return drawn

    def _strikes(self, index: int, fault: Fault, key: str, size_bytes: int) -> bool:
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
    """What one line of a plan has seen so far."""

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
        self._unheard = False

    def write(self, offset: int, view: memoryview) -> None:
        try:
            with self._faults.striking(Operation.WRITE, self._key, view.nbytes) as faults:
                self._write(offset, flat(view), faults)
        except BackendError as error:
            if not error.retryable:
                self.abort()
            raise

    def publish(self) -> None:
        """Publish; after a failure that may pass it may be asked again, and what was done unheard is not done twice."""
        try:
            with self._faults.striking(Operation.PUBLISH, self._key) as faults:
                if FaultKind.LOST_SYNC in faults:
                    raise LostWriteError(
                        f"fsync {self._key!r} in {self._faults.place}: failed on purpose; the bytes count as lost, "
                        "write the object anew"
                    )
                if not self._unheard:
                    self._inner.publish()
                self._unheard = True
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
        self._unheard = False

    def abort(self) -> None:
        self._unheard = False
        self._inner.abort()

    def _write(self, offset: int, data: memoryview, faults: Mapping[FaultKind, Fault]) -> None:
        if FaultKind.TORN_WRITE in faults:
            self._inner.write(offset, data[: self._faults.place_in(self._key, data.nbytes + 1)])
            raise self._faults.tear(faults[FaultKind.TORN_WRITE], self._key)
        if FaultKind.BIT_FLIP in faults:
            data = memoryview(bytearray(data))
            self._faults.flip(data, self._key)
        self._inner.write(offset, data)
