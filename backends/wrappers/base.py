"""Wrappers: a backend around a backend. ``Wrapper`` passes every call on; ``LastAnswer`` records when the medium last
answered; ``Limited`` limits the bytes a second. Retry, bounds and faults derive from ``Wrapper``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from tierfall.backends.toolkit.base import AbortOnExit
from tierfall.backends.toolkit.views import flat
from tierfall.core.runtime.rate_limit import SLICE_BYTES_MIN, RateLimiter
from tierfall.core.types.backend import (
    Backend,
    Publish,
    StoredObject,
    SyncedBackend,
    Traits,
    Writer,
)

T = TypeVar("T")


class Wrapper:
    """Passes every call on to ``inner``: those that may be repeated, by ``call``, which a subclass may override."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        """Make a call to ``inner`` that moves ``bytes``; ``doing`` names it for messages."""
        return function()

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def place(self) -> str:
        return self._inner.place

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        writer = self.call(
            "write",
            lambda: self._inner.create(key, length=length, length_max=length_max, publish=publish),
        )
        return self.writer(writer, key, publish)

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        """Wrap a writer that ``create`` has made."""
        return inner

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.call("read", lambda: self._inner.read_into(key, offset, view), bytes=view.nbytes)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        return self._inner.read_cached(key, offset, end, views)

    def stat(self, key: str) -> StoredObject:
        return self.call("read", lambda: self._inner.stat(key))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        return self._inner.scan(prefix)

    def delete(self, key: str) -> None:
        self.call("delete", lambda: self._inner.delete(key))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        return self.call("delete", lambda: self._inner.delete_some(keys))

    def sync(self, folder: str) -> None:
        self.call("fsync", lambda: cast(SyncedBackend, self._inner).sync(folder))

    def discard_unfinished(self, prefix: str) -> int:
        return self.call("delete", lambda: self._inner.discard_unfinished(prefix))

    def close(self) -> None:
        self._inner.close()


class LastAnswer(Wrapper):
    """Passes every call on to ``inner``. ``last_answer_s`` is the time, on the monotonic clock, when a read, an fsync,
    a deletion or a row of a listing last returned: a bounded wait distinguishes a long listing from silence by it."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.last_answer_s = time.monotonic()

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        found = function()
        self.last_answer_s = time.monotonic()
        return found

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        for stored in self._inner.scan(prefix):
            self.last_answer_s = time.monotonic()
            yield stored


class WriterWrapper(AbortOnExit):
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, offset: int, view: memoryview) -> None:
        self._inner.write(offset, view)

    def publish(self) -> None:
        self._inner.publish()

    def abort(self) -> None:
        self._inner.abort()


class Limited(Wrapper):
    """Limits ``inner`` by the rates of ``writes`` and ``reads``; None: no limit. They are separate: a restore does not
    disturb training.

    A large write is passed on slice by slice, so that a slow tier advances evenly. Idle time earns no credit: a burst
    after a pause would disturb training.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        writes: RateLimiter | None = None,
        reads: RateLimiter | None = None,
    ) -> None:
        super().__init__(inner)
        self._writes, self._reads = writes, reads

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        return _LimitedWriter(inner, self.traits, self._writes)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Wait for the whole read, then make it in one call: between two slices the object could be replaced."""
        if self._reads is not None:
            self._reads.acquire(view.nbytes, whole=True)
        self._inner.read_into(key, offset, view)

    # ``read_cached`` is not limited: it does not use the medium.


class _LimitedWriter(WriterWrapper):
    def __init__(self, inner: Writer, traits: Traits, rate: RateLimiter | None) -> None:
        super().__init__(inner)
        self._rate = rate
        # not divided if a backend bounds the length of a write, nor if offsets must rise: a retry of the whole range
        # would begin at an earlier offset
        whole = traits.part_bytes_min or traits.ordered_writes
        self._unit_bytes = 0 if whole else max(traits.alignment_bytes, SLICE_BYTES_MIN)

    def write(self, offset: int, view: memoryview) -> None:
        """Pass a range on slice by slice."""
        if self._rate is None:
            self._inner.write(offset, view)
            return
        for start, piece in self._rate.slices(flat(view), unit_bytes=self._unit_bytes):
            self._inner.write(offset + start, piece)
