"""Preparation of host memory in the background: files are reserved, their pages are touched, and locked for copies from
a device.

Images are filled and read without it, only slower: a first touch costs ten times the copy, and a copy from a device to
memory that is not locked keeps the host waiting. The thread rests as long as it has worked, BUSY_S at most, since
other threads wait for a page table, or for the driver, meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("tierfall")

REST_S = 0.001
"""The shortest rest."""
BUSY_S = 0.05
"""The longest rest, also while what is left waits for an image to be filled."""
JOIN_S = 5.0


class Preparation:
    """A thread that calls ``step`` until that returns None, and again after each ``resume``. ``step`` prepares
    a part of the memory, and returns the seconds that the thread rests at least."""

    def __init__(self, step: Callable[[], float | None], *, name: str) -> None:
        self._step = step
        self._name = name
        # Not an event: an interrupt of the thread that saves could leave its lock taken.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Prepare what is not prepared."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name=f"tierfall-{self._name}-prepare", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the limit of processes, or of memory, is reached
                self._give_up(error)
        self._wakes.put(None)

    def close(self) -> None:
        """End the thread. The pages stay as they are."""
        self._closed = True
        self._wakes.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wakes.get()
                self._prepare()
        except Exception as error:  # noqa: BLE001 - reported
            self._give_up(error)

    def _prepare(self) -> None:
        while not self._closed:
            began_s = time.monotonic()
            least_s = self._step()
            if least_s is None:
                return
            worked_s = min(time.monotonic() - began_s, BUSY_S)
            # A wake ends the rest; the next step sees what it was for.
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=max(REST_S, least_s, worked_s))

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "host memory of run %s is not prepared any further: %s; saves go on, slower",
            self._name,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
