"""Calls of user functions on a separate thread: a function that blocks or raises does not affect tierfall's threads."""

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

    An exception of a function is logged, and the next function is called. A function that does not return delays only
    the calls after it: ``put`` never blocks. ``dropped`` counts the calls that were refused because ``waiting_max``
    calls were queued (None: no bound).
    """

    def __init__(self, name: str, *, waiting_max: int | None = None) -> None:
        self._name = name
        self._waiting_max = waiting_max
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may start it while its thread does
        self._closed = False
        self._calling = False
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """The number of queued calls."""
        return self._queue.qsize()

    @property
    def busy(self) -> bool:
        """Whether a call is in progress, or queued."""
        return self._calling or not self._queue.empty()

    def start(self) -> None:
        """Start the thread unless it runs. The user's thread calls this before the first ``put``."""
        with self._lock:
            if self._thread is not None:
                return
            # daemon: a function that hangs must not prevent the process from exiting
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def put(self, function: Callable[..., object], *arguments: object) -> bool:
        """Enqueue a call; return False if the queue is full. May be called from any thread."""
        if self._waiting_max is not None and self._queue.qsize() >= self._waiting_max:
            self.dropped += 1
            return False
        self._queue.put((function, arguments))
        if self._closed:
            self._queue.put(None)
            self.start()
        return True

    def close(self, timeout_s: float) -> bool:
        """End the thread after the queued calls; return whether it has ended within ``timeout_s`` seconds.

        A later ``put`` starts another thread, which makes that call.
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
            self._calling = True
            try:
                function(*arguments)
            except BaseException:  # a callback that calls sys.exit() must not end the thread either
                logger.exception("a callback failed: %r; what comes next is called", function)
            finally:
                self._calling = False
            # what they refer to must not live on while this thread sleeps
            del call, function, arguments

    def _ended(self) -> bool:
        """Return whether the queue is empty. The thread then ends, and a later ``put`` starts another one."""
        with self._lock:
            if self._queue.empty():
                self._thread = None
            return self._thread is None
