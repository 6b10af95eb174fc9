"""Retries of idempotent calls after retryable errors.

Reads, listings, deletions, the write of one range, and ``publish`` under ``Publish.REPLACE`` are idempotent; a writer
that cannot publish again raises that it is dead, and the first error is then chained. ``publish`` under
``Publish.IF_ABSENT`` is not retried, and its retryable error is raised as one that is not: if only the answer was lost,
a second try would fail because of the first.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tierfall.backends.wrappers.base import Limited, Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
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
    its last try removed."""

    def __init__(self, inner: Backend, retry: RetryPolicy) -> None:
        super().__init__(inner)
        self._retry = retry

    def call(self, doing: str, function: Callable[[], T], *, bytes: int = 0) -> T:
        return self._retry.run(function)

    def writer(self, inner: Writer, key: str, publish: Publish) -> Writer:
        return _RetryingWriter(inner, self._retry, publish, f"{key!r} in {self.place}")

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Finish the listing before the first row is yielded, so that it can be retried as a whole."""
        yield from self.call("list", lambda: list(self._inner.scan(prefix)))


class _RetryingWriter(WriterWrapper):
    def __init__(self, inner: Writer, retry: RetryPolicy, publish: Publish, what: str) -> None:
        super().__init__(inner)
        self._retry = retry
        self._mode = publish
        self._what = what

    def write(self, offset: int, view: memoryview) -> None:
        self._retry.run(lambda: self._inner.write(offset, view))

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


def wrap(
    inner: Backend,
    *,
    writes: RateLimiter | None = None,
    reads: RateLimiter | None = None,
    retry: RetryPolicy,
) -> Backend:
    """Return ``inner`` as a tier uses it: limited by the rates of ``writes`` and ``reads``, and retried.

    The limit is inside of the retry: the bytes of every try count."""
    if (writes, reads) != (None, None):
        inner = Limited(inner, writes=writes, reads=reads)
    return Retrying(inner, retry)
