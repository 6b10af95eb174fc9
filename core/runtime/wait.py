"""Waiting that Ctrl-C cannot break.

``threading.Event`` and ``threading.Condition`` are written in Python: an interrupt that arrives at a bad moment inside
them leaves their lock taken, and the thread that is to set them hangs for ever. A queue that is written in C has no
such moment; so the training thread waits here, and nowhere else.
"""

from __future__ import annotations

import queue


class InterruptibleEvent:
    """Rung once, by any thread, and heard by the one that waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rung = False

    @property
    def rung(self) -> bool:
        return self._rung

    def ring(self) -> None:
        self._rung = True
        self._queue.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is rung; False after ``timeout`` seconds."""
        if not self._rung:
            try:
                self._queue.get(timeout=None if timeout is None else max(0.0, timeout))
            except queue.Empty:
                return self._rung
        return self._rung
