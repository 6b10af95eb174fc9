"""A rate: so many bytes a second, for all who share it together. Idle time earns nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Hands out the moments at which bytes may go, one after the other, for all threads together."""

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def wait_turn(self, size_bytes: int) -> None:
        """Return when the bytes may go: once those before them have had their time."""
        with self._lock:
            now_s = self._clock()
            start_s = max(now_s, self._free_at_s)
            self._free_at_s = start_s + size_bytes / self._bytes_per_second
        if start_s > now_s:
            _waited.seconds += start_s - now_s
            self._sleep(start_s - now_s)


class _Waited(threading.local):
    seconds = 0.0


_waited = _Waited()


def waited_s() -> float:
    """Return how many seconds the calling thread has waited for paces so far, whichever they were."""
    return _waited.seconds
