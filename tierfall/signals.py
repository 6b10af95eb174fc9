"""Signals that ask for a save: handlers that note it, and let whatever handler was there before go on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tierfall.core.errors import ConfigError

logger = logging.getLogger("tierfall")


class SignalWatch:
    """Calls ``asked`` with a signal's name, in its handler: on the main thread, between any two instructions.

    A handler that was there before runs after it; a signal's default action, to end the process, is not taken. In a
    forked child the signal does what it did before. Raises ConfigError outside of the main thread, which alone may set
    handlers, and where a handler is not Python's, and could not be gone on with.
    """

    def __init__(self, names: Sequence[str], asked: Callable[[str], None]) -> None:
        self._asked = asked
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._open = True
        if not names:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "open: interval.on_signal: only the main thread may set what a signal does; open the run there, or "
                "leave on_signal out"
            )
        before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
        for number, handler in before.items():
            if handler is None:
                raise ConfigError(
                    f"open: interval.on_signal: {number.name} has a handler that is not Python's, and could not go on; "
                    "leave it out, or open the run before that is set"
                )
        for number, handler in before.items():
            self._before[number] = handler
            signal.signal(number, self._take)

    def close(self) -> None:
        """Put back what was there before, unless somebody has put something else in its place meanwhile."""
        self._open = False
        mine = [number for number in self._before if signal.getsignal(number) == self._take]
        if mine and threading.current_thread() is not threading.main_thread():
            logger.warning(
                "close: %s: the handlers of before can be put back by the main thread only; these only pass on to them",
                ", ".join(number.name for number in mine),
            )
            return
        for number in mine:
            signal.signal(number, self._before[number])

    def _take(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        before = self._before[which]
        if os.getpid() != self._pid:
            self._as_before(which, before, frame)
            return
        if self._open:
            self._asked(which.name)
        if callable(before):
            before(number, frame)
        elif not self._open:
            self._as_before(which, before, frame)

    def _as_before(self, which: signal.Signals, before: Any, frame: FrameType | None) -> None:
        if callable(before):
            before(which, frame)
        elif before == signal.SIG_DFL:
            signal.signal(which, signal.SIG_DFL)
            os.kill(os.getpid(), which)
