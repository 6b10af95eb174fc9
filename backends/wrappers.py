"""Wrappers: a backend around a backend. ``Wrapper`` passes every call on.

``Retrying`` makes idempotent calls again after retryable errors, and limits the rates. Reads, listings, deletions, the
write of one range, and ``publish`` under ``Publish.REPLACE`` are idempotent; a writer that cannot publish again raises
that it is dead, and the first error is then chained. ``publish`` under ``Publish.IF_ABSENT`` is not retried: if only
the answer was lost, a second try would fail because of the first. The rates of writes and reads are separate: a restore
does not disturb training. The bytes of every try count. Idle time earns no credit: a burst after a pause would disturb
training. ``read_cached`` is not limited: it does not use the medium.

``Bounded`` ends calls within a bound: a restore goes on from another tier where this one does not answer, and a command
names it. A thread in a system call cannot be ended, so each call has a thread of its own, which may be left behind.
What it fills is not used again before it has returned (``runtime.buffers``). Only a read that never waits for the
medium fills memory that others use. What it writes is never published.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar, cast

from tierfall.backends.toolkit.base import AbortOnExit
from tierfall.backends.toolkit.views import flat
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.buffers import begin_filling, end_filling
from tierfall.core.runtime.rate_limit import SLICE_BYTES_MIN, RateLimiter
from tierfall.core.types.backend import (
    Backend,
    Publish,
    StoredObject,
    SyncedBackend,
    Traits,
    Writer,
)
from tierfall.core.types.errors import BackendError, UnreachableError

logger = logging.getLogger("tierfall")
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


class WriterWrapper(AbortOnExit):
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, offset: int, view: memoryview) -> None:
        self._inner.write(offset, view)

    def find(self, offset: int, view: memoryview) -> bool:
        return self._inner.find(offset, view)

    def publish(self) -> None:
        self._inner.publish()

    def abort(self) -> None:
        self._inner.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of tries and the waits between them. Waits double from ``first_wait_s`` to ``longest_wait_s``, each
    reduced at random by up to a half, so that ranks do not retry at once. No retry begins after ``total_s``."""

    tries: int = 5
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)
    total_s: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def run(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns, and retry it after retryable errors. Raises the last error."""
        start_s, number = self.clock(), 0
        while True:
            number += 1
            try:
                return call()
            except BackendError as error:
                if error.retryable and 1 < self.tries == number:
                    error.add_note(f"given up after {self.tries} tries")
                is_late = self.clock() - start_s > self.total_s
                if not error.retryable or number == self.tries or is_late:
                    raise
            self.sleep(self._wait_s(number))

    def _wait_s(self, number: int) -> float:
        full = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (number - 1))
        return full * (1.0 - 0.5 * self.rng.random())


class Retrying(Wrapper):
    """Makes each idempotent call again, by ``retry``, while its error is retryable. ``discard_unfinished`` counts what
    its last try removed.

    ``writes`` and ``reads`` limit the rates; None: no limit. ``last_answer_s`` is the time, on the monotonic clock,
    when a read, an fsync, a deletion or a row of a listing last returned: a bounded wait distinguishes a long listing
    from silence by it.
    """

    def __init__(
        self,
        inner: Backend,
        retry: RetryPolicy,
        *,
        writes: RateLimiter | None = None,
        reads: RateLimiter | None = None,
    ) -> None:
        super().__init__(inner)
        self._retry = retry
        self._writes, self._reads = writes, reads
        self.last_answer_s = time.monotonic()

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        found = self._retry.run(function)
        self.last_answer_s = time.monotonic()
        return found

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        return _RetryingWriter(inner, self._retry, publish, self._writes, self.traits)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Wait for the rate of the whole read, then make it in one call: between two, the object could be replaced."""

        def read() -> None:
            if self._reads is not None:
                self._reads.acquire(view.nbytes, whole=True)
            self._inner.read_into(key, offset, view)

        self.call("read", read)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Finish the listing before the first row is yielded, so that it can be retried as a whole."""

        def rows() -> list[StoredObject]:
            found = []
            for stored in self._inner.scan(prefix):
                self.last_answer_s = time.monotonic()
                found.append(stored)
            return found

        yield from self.call("list", rows)


class _RetryingWriter(WriterWrapper):
    def __init__(
        self,
        inner: Writer,
        retry: RetryPolicy,
        publish: Publish,
        rate: RateLimiter | None,
        traits: Traits,
    ) -> None:
        super().__init__(inner)
        self._retry = retry
        self._mode = publish
        self._rate = rate
        # not divided if a backend bounds the length of a write, nor if offsets must rise: a retry of the whole range
        # would begin at an earlier offset
        whole = traits.part_bytes_min or traits.ordered_writes
        self._unit_bytes = 0 if whole else max(traits.alignment_bytes, SLICE_BYTES_MIN)

    def write(self, offset: int, view: memoryview) -> None:
        """Write a range; with a rate slice by slice, so that a slow tier advances evenly."""
        self._retry.run(lambda: self._write_slices(offset, view))

    def _write_slices(self, offset: int, view: memoryview) -> None:
        if self._rate is None:
            self._inner.write(offset, view)
            return
        for start, piece in self._rate.slices(flat(view), unit_bytes=self._unit_bytes):
            self._inner.write(offset + start, piece)

    def publish(self) -> None:
        if self._mode is Publish.IF_ABSENT:
            self._inner.publish()
            return
        first: list[BackendError] = []

        def call() -> None:
            try:
                self._inner.publish()
            except BackendError as error:
                if first and not error.retryable:
                    # The writer is dead because of the first error, so the message has both.
                    raise type(error)(f"{error}; the first try: {first[0]}") from first[0]
                first.append(error)
                raise

        self._retry.run(call)


CLEANUP_S = 1.0
"""Seconds that each call has after an interrupt (Ctrl-C): what is cleaned up then does not hold it up."""


class Bounded(Wrapper):
    """Ends each call to ``inner``, the backend of a tier, within a bound.

    A call raises UnreachableError if the tier has answered nothing for ``bound_s`` seconds plus the time that the bytes
    of the call take at ``bytes_per_s_min``. From then on each call raises it at once, until the tier has answered
    something: ``last_answer_s`` returns when it last did, on the monotonic clock.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        tier: str,
        bound_s: float,
        bytes_per_s_min: float,
        last_answer_s: Callable[[], float],
    ) -> None:
        super().__init__(inner)
        self._tier = tier
        self._bound_s = bound_s
        self._bytes_per_s_min = bytes_per_s_min
        self._last_answer_s = last_answer_s
        self._silent: tuple[float, UnreachableError] | None = None

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        return _BoundedWriter(inner, self)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.fill(lambda: self._inner.read_into(key, offset, view), [view])

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Fill ``views`` as ``inner`` does. Without the trait ``cache_never_waits``, they are to be parts of buffers.
        With it, none of them is filled any more once the call is given up."""
        if not self.traits.cache_never_waits:
            parts = list(views)
            return self.fill(lambda: self._inner.read_cached(key, offset, end, parts), parts)
        left, lending, given_up = iter(views), threading.Lock(), threading.Event()

        def lend() -> Generator[memoryview, None, None]:
            while True:
                with lending:  # until the view is filled
                    if given_up.is_set():
                        raise UnreachableError("the read was given up")
                    if (view := next(left, None)) is None:  # which may copy what was filled before
                        return
                    yield view

        def read() -> bool:
            with closing(lend()) as lent:
                return self._inner.read_cached(key, offset, end, lent)

        try:
            return self.call("read", read, bytes=end - offset)
        finally:
            with lending:
                given_up.set()

    def fill(self, read: Callable[[], T], views: Sequence[memoryview]) -> T:
        """Make a read into parts of buffers: their memory counts as being filled (``runtime.buffers``) until it
        returns."""

        def fill() -> T:
            try:
                return read()
            finally:
                for view in views:
                    end_filling(view)

        self._check_answers()
        for view in views:
            begin_filling(view)
        return self.call("read", fill, bytes=sum(view.nbytes for view in views))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Finish the listing before the first row is yielded."""
        yield from self.call("list", lambda: list(self._inner.scan(prefix)))

    def close(self) -> None:
        self.call("close", self._inner.close)

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        """Make a call within the bound. A writer that it returns later is aborted."""
        self._check_answers()
        returned: list[bool] = []

        def noting() -> T:
            try:
                return function()
            finally:
                returned.append(True)

        try:
            answer = BoundedCalls().call_all(
                {self._tier: noting},
                {self._tier: self._bound_s + bytes / self._bytes_per_s_min},
                doing=doing,
                last_answer_s=lambda tier: self._last_answer_s(),
                too_late=_abandon,
            )[self._tier]
        except BaseException:
            self._bound_s = min(self._bound_s, CLEANUP_S)
            raise
        if not returned and isinstance(answer.error, UnreachableError):
            self._silent = time.monotonic(), answer.error
        return answer.get()

    def _check_answers(self) -> None:
        if self._silent is not None and self._last_answer_s() <= self._silent[0]:
            raise self._silent[1]


def _abandon(late: object) -> None:
    if isinstance(late, AbortOnExit):
        late.abort()


class _BoundedWriter(WriterWrapper):
    """After a call that was given up, which may still write what its memory holds then, nothing is published."""

    def __init__(self, inner: Writer, backend: Bounded) -> None:
        super().__init__(inner)
        self._backend = backend
        self._bytes = 0
        self._over = False

    def write(self, offset: int, view: memoryview) -> None:
        self._bytes += view.nbytes
        write = super().write
        self._call("write", lambda: write(offset, view), bytes=view.nbytes)

    def find(self, offset: int, view: memoryview) -> bool:
        find = super().find
        return self._backend.fill(lambda: find(offset, view), [view])

    def publish(self) -> None:
        """Publish within the bound, and the time that all bytes take: they may only now reach the medium."""
        self._call("write", super().publish, bytes=self._bytes)

    def abort(self) -> None:
        """Abort; a tier that does not answer keeps an unfinished file, which counts for nothing."""
        try:
            self._backend.call("abort", super().abort)
        except UnreachableError as error:
            logger.warning("an unfinished file is left: %s", error)

    def _call(self, doing: str, call: Callable[[], None], *, bytes: int) -> None:
        if self._over:
            raise UnreachableError("an earlier write was given up: write a new object")
        returned: list[bool] = []

        def noting() -> None:
            try:
                call()
            finally:
                returned.append(True)

        try:
            self._backend.call(doing, noting, bytes=bytes)
        finally:
            self._over = self._over or not returned
