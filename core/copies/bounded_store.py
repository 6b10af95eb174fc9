"""A stored tier whose reads end within a bound: a restore goes on from another tier where this one does not answer.

A thread in a system call cannot be ended, so each read has a thread of its own, which may be left behind. What it fills
is not used again before it has returned (``runtime.buffers``). What is in the page cache is read without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from tierfall.core.copies.images import ReadableStore
from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.runtime.buffers import begin_filling, end_filling
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, Codec, Shard

T = TypeVar("T")


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
        self._check_answers()
        return self._store.read_cached(checkpoint, shard, offset, end, views, codec=codec)

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
