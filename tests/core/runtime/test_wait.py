"""An event that several threads wait for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tierfall.core.runtime.wait import InterruptibleEvent

THREADS = 4


def test_all_threads_that_wait_go_on_once_it_is_set() -> None:
    event, here = InterruptibleEvent(), threading.Barrier(THREADS + 1)

    def wait() -> bool:
        here.wait()
        return event.wait(60)

    pool = ThreadPoolExecutor(THREADS)
    waits = [pool.submit(wait) for _ in range(THREADS)]
    here.wait()
    assert not event.wait(0.05)  # time for the others to wait, too
    event.set()
    assert [each.result(timeout=10) for each in waits] == [True] * THREADS
    pool.shutdown()
