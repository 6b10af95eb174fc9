"""Limits of the bytes a second.

A large write is passed on slice by slice, so that a slow tier advances evenly. Idle time earns no credit: a burst after
a pause would disturb training. Reads and writes have separate limits: a restore does not disturb training.
"""

from __future__ import annotations

from tierfall.backends.toolkit.views import flat
from tierfall.backends.wrappers.base import Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import SLICE_BYTES_MIN, RateLimiter
from tierfall.core.types.backend import Backend, Publish, Traits, Writer


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
