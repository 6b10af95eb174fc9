"""Limits of the bytes a second.

A large write is passed on slice by slice, so that a slow tier advances evenly. Idle time earns no credit: a burst after
a pause would disturb training. Reads and writes have separate limits: a restore does not disturb training.
"""

from __future__ import annotations

from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.backend import Backend, Publish, Traits, Writer

SLICE_S = 0.05
SLICE_BYTES_MIN = 256 * 1024


class Limited(Wrapper):
    """Limits ``inner`` by the rates of ``writes`` and ``reads``; None: no limit."""

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
        self._traits, self._rate = traits, rate

    def write(self, offset: int, view: memoryview) -> None:
        """Pass a range on slice by slice, each after its wait; an empty range is passed on too."""
        if self._rate is None:
            self._inner.write(offset, view)
            return
        data = flat(view)
        step = _slice_bytes(self._traits, self._rate.bytes_per_second) or max(data.nbytes, 1)
        for start in range(0, max(data.nbytes, 1), step):
            piece = data[start : start + step]
            self._rate.acquire(piece.nbytes)
            self._inner.write(offset + start, piece)


def _slice_bytes(traits: Traits, bytes_per_second: float | None) -> int:
    """Return the length of a slice; 0 (no slices) without a rate, where a backend bounds the length of a write, and
    where offsets must rise, since a retry of the whole range would begin at an earlier offset."""
    if bytes_per_second is None or traits.part_bytes_min or traits.ordered_writes:
        return 0
    unit = max(traits.alignment_bytes, SLICE_BYTES_MIN)
    return max(1, round(bytes_per_second * SLICE_S) // unit) * unit
