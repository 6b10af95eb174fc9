"""A stored tier whose reads end within a bound: a restore goes on from another tier where this one does not answer.

A thread in a system call cannot be ended, so each read has a thread of its own, which may be left behind. What it fills
is not used again before it has returned (``runtime.buffers``). Only a read that never waits for the medium fills memory
that others use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from tierfall.core.copies.images import ReadableStore
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.buffers import begin_filling, end_filling
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, Codec, Shard

T = TypeVar("T")


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


class BoundedStore:
    """A stored tier whose reads end within a bound. May be used by several threads.

    A read raises UnreachableError if ``store`` has answered nothing for ``bound_s`` seconds plus the time that the
    requested bytes take at ``bytes_per_s_min``. From then on each read raises it at once, until the store has answered
    something: ``last_answer_s`` returns when it last did, on the monotonic clock.
    """

    def __init__(
        self,
        store: ReadableStore,
        *,
        bound_s: float,
        bytes_per_s_min: float,
        last_answer_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._bound_s = bound_s
        self._bytes_per_s_min = bytes_per_s_min
        self._last_answer_s = last_answer_s
        self._silent: tuple[float, UnreachableError] | None = None

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def cache_never_waits(self) -> bool:
        return self._store.cache_never_waits

    def read_manifest(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        self._check_answers()
        return self._call(partial(self._store.read_manifest, checkpoint, shard))

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        self._check_answers()
        return self._call(partial(self._store.read_stored, checkpoint, shard))

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        self._check_answers()

        def fill() -> None:
            try:
                self._store.read_into(checkpoint, shard, offset, view, codec=codec)
            finally:
                end_filling(view)

        begin_filling(view)
        self._call(fill, bytes=view.nbytes)

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool:
        """Fill ``views`` as the store does. Without ``cache_never_waits``, they are to be parts of buffers."""
        self._check_answers()
        lent = LentViews(views, waits=not self.cache_never_waits)

        def fill() -> bool:
            try:
                return self._store.read_cached(checkpoint, shard, offset, end, lent, codec=codec)
            finally:
                lent.on_filled()

        try:
            return self._call(fill, bytes=end - offset)
        finally:
            lent.take_back()

    def _check_answers(self) -> None:
        if self._silent is not None and self._last_answer_s() <= self._silent[0]:
            raise self._silent[1]

    def _call(self, read: Callable[[], T], *, bytes: int = 0) -> T:
        returned: list[bool] = []

        def call() -> T:
            try:
                return read()
            finally:
                returned.append(True)

        bound_s = self._bound_s + bytes / self._bytes_per_s_min
        answer = BoundedCalls().call_all(
            {self.name: call},
            {self.name: bound_s},
            doing="read",
            last_answer_s=lambda name: self._last_answer_s(),
        )[self.name]
        if not returned and isinstance(answer.error, UnreachableError):
            self._silent = time.monotonic(), answer.error
        return answer.get()
