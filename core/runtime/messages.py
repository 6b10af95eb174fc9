"""Log messages leave tierfall's threads by a thread of their own: a handler that blocks, such as one on a terminal that
Ctrl-S has stopped or on a pipe that nobody reads, would else stop a thread that the training waits for.

A thread is tierfall's if its name begins with ``tierfall-``. A message of another thread is handled there, as usual; if
earlier ones still wait, it follows them, and its thread waits a second for it.

A handler that raises fails no call: its traceback is printed, as those of the handlers of ``logging`` are.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback

from tierfall.core.runtime.callbacks import CallbackThread
from tierfall.core.runtime.wait import InterruptibleEvent

logger = logging.getLogger("tierfall")
WAIT_S = 1.0
"""Seconds for which a thread that is not tierfall's, and the end of a run, wait for earlier messages."""
WAITING_MAX = 10_000
_OURS = "tierfall-"
_NAME = "tierfall-messages"


class _HandOver(logging.Filter):
    """Takes the messages of the logger that are handled by the other thread, and passes all others."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a forked child: the thread has stayed in the parent."""
        self._thread = CallbackThread(_NAME, waiting_max=WAITING_MAX)

    def filter(self, record: logging.LogRecord) -> bool:
        name = threading.current_thread().name
        ours = name.startswith(_OURS)
        if name == _NAME or not (ours or self._thread.busy):
            return True
        record.msg, record.args = record.getMessage(), None  # what it names may change meanwhile
        if ours:  # else it runs, and a signal handler must not wait for its lock
            self._thread.start()
        if self._thread.put(logger.handle, record) and (lost := self._thread.dropped):
            self._thread.dropped = 0
            self._thread.put(
                logger.warning, "%d log messages were lost: their handler was too slow", lost
            )
        if not ours:
            self.wait(WAIT_S)
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until all messages so far are handled, for ``timeout_s`` seconds at most."""
        handled = InterruptibleEvent()
        if self._thread.busy and self._thread.put(handled.set):
            handled.wait(timeout_s)


def _call_handlers(record: logging.LogRecord) -> None:
    try:
        logging.Logger.callHandlers(logger, record)
    except Exception:  # noqa: BLE001 - a user's handler may raise anything
        if logging.raiseExceptions:
            traceback.print_exc()


logger.callHandlers = _call_handlers  # type: ignore[method-assign]
_hand_over = _HandOver()
logger.addFilter(_hand_over)
os.register_at_fork(after_in_child=_hand_over.reset)


@atexit.register
def wait_for_messages() -> None:
    """Wait until the messages so far are handled, for a second at most."""
    _hand_over.wait(WAIT_S)
