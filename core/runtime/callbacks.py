"""Calls of a user's functions, on a thread of their own: what they do, or raise, reaches no thread of tierfall."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import signature_fault

logger = logging.getLogger("tierfall")

Call = tuple[Callable[..., object], tuple[object, ...]]


def check_callback(function: object, expected: str, *, call: str) -> None:
    """Raise ConfigError unless a function can be called with the parameters ``expected``, such as ``(event)``."""
    if not callable(function):
        raise ConfigError(f"{call}: {function!r} is no function; expected one of {expected}")
    if fault := signature_fault(function, expected):
        raise ConfigError(f"{call}: {function!r} cannot be called: {fault}")


class CallbackThread:
    """Calls functions one after another, in the order of ``put``, on a daemon thread that holds no lock.

    An exception of a function is logged, and the next one is called. A function that does not return delays those after
    it, and nothing else: ``put`` never waits. ``dropped`` counts the calls that were refused because ``waiting_max``
    waited already (None: no bound).
    """

    def __init__(self, name: str, *, waiting_max: int | None = None) -> None:
        self._name = name
        self._waiting_max = waiting_max
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start the thread unless it runs: before the first ``put``, on the thread of the user."""
        with self._lock:
            if self._thread is not None:
                return
            # daemon: a function that hangs must not stop a program from ending
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def put(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call a function later; False where too many calls wait. For any thread."""
        if self._waiting_max is not None and self._queue.qsize() >= self._waiting_max:
            self.dropped += 1
            return False
        self._queue.put((function, arguments))
        if self._closed:
            self._queue.put(None)
            self.start()
        return True

    def close(self, timeout_s: float) -> bool:
        """End the thread after the waiting calls; return whether it has ended within ``timeout_s`` seconds.

        What is put later is called all the same.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._queue.put(None)
        if thread is None or thread is threading.current_thread():  # a callback closes the run
            return thread is None
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None or not self._ended():
            if call is None:
                continue
            function, arguments = call
            try:
                function(*arguments)
            except BaseException:  # a callback that calls sys.exit() must not end the thread either
                logger.exception("a callback failed: %r; what comes next is called", function)

    def _ended(self) -> bool:
        """Whether nothing waits: whoever puts something later starts another thread."""
        with self._lock:
            if self._queue.empty():
                self._thread = None
            return self._thread is None
