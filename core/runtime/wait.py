"""An event that is safe against KeyboardInterrupt.

``threading.Event`` and ``threading.Condition`` are written in Python: an interrupt inside them can leave their lock
held, and the thread that sets them then hangs forever. ``queue.SimpleQueue`` is written in C and has no such window. So
the training thread waits here, and nowhere else.
"""

from __future__ import annotations

import queue


class InterruptibleEvent:
    """Set once, by any thread; any number of threads wait for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rung = False

    @property
    def is_set(self) -> bool:
        return self._rung

    def set(self) -> None:
        self._rung = True
        self._queue.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False after ``timeout`` seconds."""
        if not self._rung:
            try:
                self._queue.get(timeout=None if timeout is None else max(0.0, timeout))
            except queue.Empty:
                return self._rung
            # For the next thread: of several in ``get``, one that finds the queue empty again may wait for ever, even
            # with a timeout (CPython 3.11).
            self._queue.put(None)
        return self._rung
