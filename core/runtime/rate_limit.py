"""A rate limit in bytes per second, shared by several threads. Idle time earns no credit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.05
SLICE_BYTES_MIN = 256 * 1024


class RateLimiter:
    """Schedules transfers of all threads one after the other at one rate."""

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = clock()

    @property
    def bytes_per_second(self) -> float | None:
        """The rate; None means no limit."""
        return self._bytes_per_second

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Set another rate (None: no limit). Threads that already wait keep the old rate for their bytes."""
        with self._lock:
            now_s, before = self._clock(), self._bytes_per_second
            self._bytes_per_second = bytes_per_second
            if bytes_per_second is None or before is None:
                self._free_at_s = now_s
            else:
                left_s = max(0.0, self._free_at_s - now_s)
                self._free_at_s = now_s + left_s * before / bytes_per_second

    def acquire(self, size_bytes: int, *, whole: bool = False) -> None:
        """Reserve time for these bytes after all earlier ones, and wait until it begins; ``whole``: until it ends."""
        with self._lock:
            if self._bytes_per_second is None:
                return
            now_s = self._clock()
            start_s = max(now_s, self._free_at_s)
            self._free_at_s = start_s + size_bytes / self._bytes_per_second
            until_s = self._free_at_s if whole else start_s
        if until_s > now_s:
            _waited.seconds = waited_s() + until_s - now_s
            self._sleep(until_s - now_s)

    def slices(
        self, view: memoryview, *, unit_bytes: int = SLICE_BYTES_MIN
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield a flat range slice by slice, each with its offset, after its wait; an empty range is one slice. A slice
        is a multiple of ``unit_bytes``; 0: the range is not divided."""
        rate, step = self._bytes_per_second, max(view.nbytes, 1)
        if rate is not None and unit_bytes:
            step = max(1, round(rate * SLICE_S) // unit_bytes) * unit_bytes
        for start in range(0, max(view.nbytes, 1), step):
            piece = view[start : start + step]
            self.acquire(piece.nbytes)
            yield start, piece


_waited = threading.local()


def waited_s() -> float:
    """Total seconds that the calling thread has waited for rate limiters."""
    found: float = getattr(_waited, "seconds", 0.0)
    return found
