"""Trying again, where the same call may succeed a moment later and saying it twice is the same as saying it once.

Reads, listings, deletions, the writing of one range, and ``publish`` under ``Publish.REPLACE`` are such calls: a writer
that could not publish twice says by itself that it is dead, and the first error is chained then. Under
``Publish.IF_ABSENT`` publishing is not repeated, and a retryable error becomes one that is not: its answer may be lost
after it took effect, and a second try could lose to the first. It knows no keys' meaning and no medium.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.backends.wrappers.limit import Limited
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
from tierfall.core.types.errors import BackendError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long apart: waits double from ``first_wait_s`` to ``longest_wait_s``, each cut by a random
    part of up to a half, so that many ranks do not come back at once. Nothing is tried again after ``most_s``."""

    tries: int
    first_wait_s: float
    longest_wait_s: float
    sleep: Callable[[float], None]
    rng: random.Random
    most_s: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def again(self, call: Callable[[], T]) -> T:
        """Return what the call returns, calling again after retryable errors; the last error is raised as it is."""
        start_s = self.clock()
        for number in range(1, self.tries):
            try:
                return call()
            except BackendError as error:
                if not error.retryable or self.clock() - start_s > self.most_s:
                    raise
            self.sleep(self._wait_s(number))
        return self._last(call)

    def _last(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BackendError as error:
            if error.retryable and self.tries > 1:
                error.add_note(f"given up after {self.tries} tries")
            raise

    def _wait_s(self, number: int) -> float:
        full = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (number - 1))
        return full * (1.0 - 0.5 * self.rng.random())


class Retrying(Wrapper):
    """Calls ``inner`` up to ``tries`` times where its error is retryable and the call may be repeated."""

    def __init__(
        self,
        inner: Backend,
        *,
        tries: int = 5,
        first_wait_s: float = 0.2,
        longest_wait_s: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        if tries < 1 or first_wait_s < 0 or longest_wait_s < 0:
            raise ValueError(f"Retrying: {tries} tries and waits below 0 s make no sense")
        super().__init__(inner)
        self._patience = RetryPolicy(
            tries=tries,
            first_wait_s=first_wait_s,
            longest_wait_s=longest_wait_s,
            sleep=sleep,
            rng=rng or random.Random(),
        )

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        writer = self._patience.again(
            lambda: self._inner.create(key, length=length, length_max=length_max, publish=publish)
        )
        return _RetryingWriter(writer, self._patience, publish, f"{key!r} in {self.place}")

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self._patience.again(lambda: self._inner.read_into(key, offset, view))

    def stat(self, key: str) -> StoredObject:
        return self._patience.again(lambda: self._inner.stat(key))

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """List whole before the first item is handed out, so that a listing that broke off can begin again."""
        yield from self._patience.again(lambda: list(self._inner.scan(prefix)))

    def delete(self, key: str) -> None:
        self._patience.again(lambda: self._inner.delete(key))

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        return self._patience.again(lambda: self._inner.delete_some(keys))

    def sync(self, folder: str) -> None:
        call = super().sync
        self._patience.again(lambda: call(folder))

    def discard_unfinished(self, prefix: str) -> int:
        """Return how many the last try removed: those of a try that failed halfway are not counted."""
        return self._patience.again(lambda: self._inner.discard_unfinished(prefix))


class _RetryingWriter(WriterWrapper):
    def __init__(self, inner: Writer, patience: RetryPolicy, publish: Publish, what: str) -> None:
        super().__init__(inner)
        self._patience = patience
        self._mode = publish
        self._what = what

    def write(self, offset: int, view: memoryview) -> None:
        self._patience.again(lambda: self._inner.write(offset, view))

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
                    # That the writer is dead now follows from what the first try met: whoever reads it wants both.
                    raise type(error)(f"{error}; the first try: {first[0]}") from first[0]
                first.append(error)
                raise

        self._patience.again(call)


def wrap(
    inner: Backend,
    *,
    bandwidth: int | None = None,
    max_parallel: int | None = None,
    writes: RateLimiter | None = None,
    tries: int = 5,
    first_wait_s: float = 0.2,
    longest_wait_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> Backend:
    """Return ``inner`` as a tier uses it: limited to ``bandwidth`` bytes a second each way and ``max_parallel`` calls
    (None: no limit), and retried up to ``tries`` times. What goes there keeps to ``writes`` where that is given.

    The limit sits on the medium, so that every byte that goes there is counted, those of a second try too, and no slot
    is held while a retry waits; retrying is outermost."""
    backend = inner
    if bandwidth is not None or max_parallel is not None or writes is not None:
        backend = Limited(
            backend,
            bytes_per_second=bandwidth,
            max_parallel=max_parallel,
            writes=writes,
            clock=clock,
            sleep=sleep,
        )
    return Retrying(
        backend,
        tries=tries,
        first_wait_s=first_wait_s,
        longest_wait_s=longest_wait_s,
        sleep=sleep,
        rng=rng,
    )
