"""The thread of callbacks: bounded where that is asked for, and its end."""

from __future__ import annotations

import threading

from tierfall.core.runtime.callbacks import CallbackThread

PATIENCE_S = 20.0


def blocked(thread: CallbackThread) -> threading.Event:
    """Keep a thread busy until the event is set."""
    release, begun = threading.Event(), threading.Event()
    thread.start()

    def wait() -> None:
        begun.set()
        release.wait(PATIENCE_S)

    thread.put(wait)
    assert begun.wait(PATIENCE_S)
    return release


def test_calls_beyond_the_bound_are_refused_and_counted() -> None:
    thread, made = CallbackThread("bounded", waiting_max=2), list[int]()
    release = blocked(thread)
    assert [thread.put(made.append, n) for n in range(5)] == [True, True, False, False, False]
    assert (thread.dropped, thread.waiting) == (3, 2)
    release.set()
    assert thread.close(PATIENCE_S)
    assert made == [0, 1]


def test_close_makes_the_waiting_calls_but_waits_no_longer_than_it_may() -> None:
    thread, made = CallbackThread("slow"), threading.Event()
    release = blocked(thread)
    thread.put(made.set)
    assert not thread.close(0.0)
    assert not made.is_set()
    release.set()
    assert made.wait(PATIENCE_S), "what was late is called while the process lives"


def test_a_callback_that_closes_does_not_wait_for_itself() -> None:
    thread, closed = CallbackThread("itself"), threading.Event()

    def close() -> None:
        thread.close(PATIENCE_S)
        closed.set()

    thread.start()
    thread.put(close)
    assert closed.wait(PATIENCE_S / 2)
