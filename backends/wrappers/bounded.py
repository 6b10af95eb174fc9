"""A backend whose calls end within a bound: a restore goes on from another tier where this one does not answer, and a
command names it.

A thread in a system call cannot be ended, so each call has a thread of its own, which may be left behind. What it fills
is not used again before it has returned (``runtime.buffers``). Only a read that never waits for the medium fills memory
that others use. What it writes is never published.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tierfall.backends.toolkit.base import AbortOnExit
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.buffers import begin_filling, end_filling
from tierfall.core.types.backend import Backend, Publish, StoredObject, Writer
from tierfall.core.types.errors import UnreachableError

logger = logging.getLogger("tierfall")
T = TypeVar("T")
CLEANUP_S = 1.0
"""Seconds that each call has after an interrupt (Ctrl-C): what is cleaned up then does not hold it up."""


class LentViews:
    """Views that another thread fills, one after the other, until they are taken back.

    After that none is filled any more, unless its read ``waits`` for a medium: then its memory counts as being filled
    (``runtime.buffers``) until that read returns.
    """

    def __init__(self, views: Iterable[memoryview], *, waits: bool) -> None:
        self._views = views
        self._waits = waits
        self._changed = threading.Condition()
        self._over = False
        self._filled: memoryview | None = None

    def __iter__(self) -> Iterator[memoryview]:
        views = iter(self._views)
        while True:
            with self._changed:
                if self._over:
                    raise UnreachableError("the read was given up")
                view = next(views, None)  # which may copy what was filled before
                if view is None:
                    return
                self._filled = view
                if self._waits:
                    begin_filling(view)
            yield view
            self.on_filled()

    def on_filled(self) -> None:
        """The store has filled the last view that it asked for, or has returned."""
        with self._changed:
            view, self._filled = self._filled, None
            if view is not None and self._waits:
                end_filling(view)
            self._changed.notify()

    def take_back(self) -> None:
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._filled is None or self._waits)


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
        def fill() -> None:
            try:
                self._inner.read_into(key, offset, view)
            finally:
                end_filling(view)

        self._check_answers()
        begin_filling(view)
        self.call("read", fill, bytes=view.nbytes)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """Fill ``views`` as ``inner`` does. Without the trait ``cache_never_waits``, they are to be parts of
        buffers."""
        lent = LentViews(views, waits=not self.traits.cache_never_waits)

        def fill() -> bool:
            try:
                return self._inner.read_cached(key, offset, end, lent)
            finally:
                lent.on_filled()

        try:
            return self.call("read", fill, bytes=end - offset)
        finally:
            lent.take_back()

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
