"""A rate: so many bytes a second, for all who share it together. Idle time earns nothing; it may change at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimiter:
    """Hands out the moments at which bytes may go, one after the other, for all threads together."""

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
        """The rate; None where there is none, and nobody waits."""
        return self._bytes_per_second

    def change(self, bytes_per_second: float | None) -> None:
        """Go on at another rate (None: at any): who waits already keeps to the old one for what it asked for."""
        with self._lock:
            now_s, before = self._clock(), self._bytes_per_second
            self._bytes_per_second = bytes_per_second
            if bytes_per_second is None or before is None:
                self._free_at_s = now_s
            else:
                left_s = max(0.0, self._free_at_s - now_s)
                self._free_at_s = now_s + left_s * before / bytes_per_second

    def wait_turn(self, size_bytes: int) -> None:
        """Return when the bytes may go: once those before them have had their time."""
        with self._lock:
            if self._bytes_per_second is None:
                return
            now_s = self._clock()
            start_s = max(now_s, self._free_at_s)
            self._free_at_s = start_s + size_bytes / self._bytes_per_second
        if start_s > now_s:
            _waited.seconds += start_s - now_s
            self._sleep(start_s - now_s)


class _ThreadWaits(threading.local):
    seconds = 0.0


_waited = _ThreadWaits()


def waited_s() -> float:
    """Return how many seconds the calling thread has waited for paces so far, whichever they were."""
    return _waited.seconds
