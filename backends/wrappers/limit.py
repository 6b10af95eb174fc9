"""Limits of the bytes a second, and of concurrent calls.

A large write is passed on slice by slice, so that a slow tier advances evenly. Idle time earns no credit: a burst after
a pause would disturb training. Reads and writes have separate limits: a restore does not disturb training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.backend import Backend, Publish, StoredObject, Traits, Writer

SLICE_S = 0.05
SLICE_BYTES_MIN = 256 * 1024


class Limited(Wrapper):
    """Limits ``inner`` by the rates of ``writes`` and ``reads``, and to ``max_parallel`` concurrent calls (None: no
    limit)."""

    def __init__(
        self,
        inner: Backend,
        *,
        writes: RateLimiter | None = None,
        reads: RateLimiter | None = None,
        max_parallel: int | None = None,
    ) -> None:
        if max_parallel is not None and max_parallel < 1:
            raise ValueError(
                f"Limited: max_parallel is {max_parallel}; expected 1 or more, or None"
            )
        super().__init__(inner)
        self._slots = threading.BoundedSemaphore(max_parallel) if max_parallel else None
        self._max_parallel = max_parallel
        self._writes, self._reads = writes, reads

    @property
    def traits(self) -> Traits:
        traits = self._inner.traits
        if self._max_parallel is None:
            return traits
        return replace(traits, max_parallel=min(traits.max_parallel, self._max_parallel))

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> Writer:
        with self.slot():
            writer = self._inner.create(key, length=length, length_max=length_max, publish=publish)
        return _LimitedWriter(writer, self)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Wait for the whole read, then make it in one call: between two slices the object could be replaced."""
        if self._reads is not None:
            self._reads.acquire(view.nbytes, whole=True)
        with self.slot():
            self._inner.read_into(key, offset, view)

    # ``read_cached`` is not limited: it does not use the medium.

    def stat(self, key: str) -> StoredObject:
        with self.slot():
            return self._inner.stat(key)

    def delete(self, key: str) -> None:
        with self.slot():
            self._inner.delete(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        with self.slot():
            return self._inner.delete_some(keys)

    def sync(self, folder: str) -> None:
        with self.slot():
            super().sync(folder)

    def write_in_slices(self, writer: Writer, offset: int, view: memoryview) -> None:
        """Pass a range on slice by slice, each after its wait; an empty range is passed on too."""
        data = flat(view)
        rate = None if self._writes is None else self._writes.bytes_per_second
        step = _slice_bytes(self._inner.traits, rate) or max(data.nbytes, 1)
        for start in range(0, max(data.nbytes, 1), step):
            piece = data[start : start + step]
            if self._writes is not None:
                self._writes.acquire(piece.nbytes)
            with self.slot():
                writer.write(offset + start, piece)

    @contextmanager
    def slot(self) -> Iterator[None]:
        if self._slots is None:
            yield
            return
        with self._slots:
            yield


class _LimitedWriter(WriterWrapper):
    def __init__(self, inner: Writer, limits: Limited) -> None:
        super().__init__(inner)
        self._limits = limits

    def write(self, offset: int, view: memoryview) -> None:
        self._limits.write_in_slices(self._inner, offset, view)

    def publish(self) -> None:
        with self._limits.slot():
            self._inner.publish()


def _slice_bytes(traits: Traits, bytes_per_second: float | None) -> int:
    """Return the length of a slice; 0 (no slices) without a rate, where a backend bounds the length of a write, and
    where offsets must rise, since a retry of the whole range would begin at an earlier offset."""
    if bytes_per_second is None or traits.part_bytes_min or traits.ordered_writes:
        return 0
    unit = max(traits.alignment_bytes, SLICE_BYTES_MIN)
    return max(1, round(bytes_per_second * SLICE_S) // unit) * unit
