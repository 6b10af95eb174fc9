"""The thread of callbacks: bounded where that is asked for, and its end."""

from __future__ import annotations

import threading

from tierfall.core.runtime.callbacks import CallbackThread

PATIENCE_S = 20.0


def test_a_callback_that_closes_does_not_wait_for_itself() -> None:
    thread, closed = CallbackThread("itself"), threading.Event()

    def close() -> None:
        thread.close(PATIENCE_S)
        closed.set()

    thread.start()
    thread.put(close)
    assert closed.wait(PATIENCE_S / 2)
