"""A backend as a tier uses it: idempotent calls are made again after retryable errors, and rates are limited.

Reads, listings, deletions, the write of one range, and ``publish`` under ``Publish.REPLACE`` are idempotent; a writer
that cannot publish again raises that it is dead, and the first error is then chained. ``publish`` under
``Publish.IF_ABSENT`` is not retried, and its retryable error is raised as one that is not: if only the answer was lost,
a second try would fail because of the first.

The rates of writes and reads are separate: a restore does not disturb training. The bytes of every try count. Idle time
earns no credit: a burst after a pause would disturb training. ``read_cached`` is not limited: it does not use the
medium.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import SLICE_BYTES_MIN, RateLimiter
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer
from tierfall.core.types.errors import BackendError

T = TypeVar("T")


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
        what = f"{key!r} in {self.place}"
        return _RetryingWriter(inner, self._retry, publish, what, self._writes, self.traits)

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
        what: str,
        rate: RateLimiter | None,
        traits: Traits,
    ) -> None:
        super().__init__(inner)
        self._retry = retry
        self._mode = publish
        self._what = what
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
            self._publish_once()
        else:
            self._publish_again()

    def _publish_once(self) -> None:
        try:
            self._inner.publish()
        except BackendError as error:
            if error.retryable:
                raise BackendError(
                    f"publish {self._what}: no answer, so it is not known whether it was created; read it and compare "
                    "before trying again"
                ) from error
            raise

    def _publish_again(self) -> None:
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
