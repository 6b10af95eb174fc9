"""The threads of a restore share the work."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tierfall.core.runtime.threads import run_in_threads

PATIENCE_S = 20.0


def test_failure_is_raised_once_the_other_threads_have_stopped() -> None:
    together = threading.Barrier(2)
    begun: list[int] = []
    ended: list[int] = []

    def one(number: int) -> None:
        begun.append(number)
        together.wait(PATIENCE_S)
        if number == 0:
            raise MemoryError
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(MemoryError):
        run_in_threads(2, one, range(9))
    assert (sorted(begun), ended) == ([0, 1], [1])


def test_an_interrupt_is_raised_once_all_threads_have_stopped() -> None:
    """They write into tensors of the program. The interrupt comes while the first one is waited for."""
    ended: list[int] = []
    begun, interrupted = threading.Event(), threading.Event()

    def one(number: int) -> None:
        if number == 0:
            begun.set()
            interrupted.wait(PATIENCE_S)
            time.sleep(1.5)
        ended.append(number)

    def press() -> None:
        begun.wait(PATIENCE_S)
        time.sleep(0.3)
        interrupted.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(2, one, range(2))
    assert sorted(ended) == [0, 1]
    presser.join()
