"""Work on several threads, which the end of the interpreter does not wait for: one may be in a system call that never
returns.

An interrupt (Ctrl-C) of the thread that waits for them also gives up the bounded calls (``runtime.bounded_calls``) that
they wait for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from tierfall.core.runtime.conditions import Conditions

_conditions = Conditions()

K = TypeVar("K")
T = TypeVar("T")
WAKE_S = 1.0
"""Seconds after which a thread that waits for others looks whether it was interrupted: a signal that comes just before
it sleeps, or that the kernel gives to another thread, does not wake it."""
_interrupts = threading.local()


class InterruptedWaitError(BaseException):
    """A call was given up, since the thread that waits for this one was interrupted."""


def interrupt_of_thread() -> threading.Event | None:
    """Return the event that interrupts this thread, if there is one."""
    return getattr(_interrupts, "event", None)


def is_stopped() -> bool:
    """Return whether another thread that does the same work as this one has failed: nothing more is begun."""
    return bool((stop := getattr(_interrupts, "stop", None)) and stop.is_set())


def run_in_threads(threads: int, do: Callable[[K], None], items: Iterable[K]) -> None:
    """Do something for each item, begun in their order, on so many threads; once it fails, no more is begun. If no
    more threads can be started, this one helps those that run. ``items`` may wait for its next one until
    ``is_stopped``.

    Raises a first failure once all threads have stopped. After an interrupt (Ctrl-C) of this thread, no more is begun,
    and what the others wait for is given up.
    """
    work, started = _SharedWork(do, items), list[threading.Thread]()
    try:
        for number in range(threads):
            thread = threading.Thread(target=work.help, name=f"tierfall-work-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # at the limit of processes
                work.do_all(Exception)
                break
            started.append(thread)
        for thread in started:
            while thread.is_alive():
                thread.join(WAKE_S)
    except BaseException:
        work.interrupt()
        raise
    if work.failures:
        raise work.failures[0]


class _SharedWork(Generic[K]):
    """Items that several threads share. ``_begun`` has an event for each thread that may take some, set once it takes
    no more: an interrupt within ``Thread.start`` leaves open whether that one begins, and one within ``Thread.join``
    counts a thread as ended that goes on (Python 3.11, 3.12)."""

    def __init__(self, do: Callable[[K], None], items: Iterable[K]) -> None:
        self.failures: list[BaseException] = []
        self._do, self._left = do, iter(items)
        self._taking = threading.Lock()
        self._stop, self._interrupted = threading.Event(), threading.Event()
        self._begun: list[threading.Event] = []

    def help(self) -> None:
        """Do what is left, on a thread of its own."""
        done = threading.Event()
        self._begun.append(done)
        _interrupts.event, _interrupts.stop = self._interrupted, self._stop
        try:
            self.do_all(BaseException)
        finally:
            done.set()

    def do_all(self, caught: type[BaseException]) -> None:
        """Do what is left, with the other threads. An error that is ``caught`` is a failure: no more is begun."""
        try:
            while (item := self._next()) is not None:
                self._do(item)
        except caught as error:
            self._stop.set()
            self.failures.append(error)

    def _next(self) -> K | None:
        with self._taking:
            return None if self._stop.is_set() else next(self._left, None)

    def interrupt(self) -> None:
        """End the threads; what they wait for is given up. One that begins later finds nothing to do."""
        self._stop.set()
        self._interrupted.set()
        for done in self._begun:
            while not done.wait(WAKE_S):
                pass


def run_in_parallel(do: Callable[[K], T], items: Iterable[K], *, parallel: int) -> list[T]:
    """Call ``do`` for each item on up to ``parallel`` threads; return the results in the items' order. Raises as
    ``run_in_threads`` does. A single call is made by this thread."""
    arguments = list(items)
    threads = min(parallel, len(arguments))
    if threads < 2:
        return [do(each) for each in arguments]
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = do(arguments[number])

    run_in_threads(threads, run, range(len(arguments)))
    return [results[number] for number in range(len(arguments))]


@contextmanager
def helped_by(count: int, task: Callable[[], None], *, name: str) -> Iterator[None]:
    """Call ``task`` on so many threads during the block; fewer at the limit of processes, or of memory. The end of the
    block waits until all calls have returned: the block has to let them. ``task`` raises nothing."""
    running: list[threading.Thread] = []
    try:
        for number in range(count):
            thread = threading.Thread(target=task, name=f"{name}-{number}", daemon=True)
            thread.start()
            running.append(thread)
    except RuntimeError as error:
        found, wanted = len(running) + 1, count + 1
        text = "%s: goes on with %d of %d threads: %s"
        _conditions.report(name, logging.WARNING, text, name, found, wanted, error)
    try:
        yield
    finally:
        for thread in running:
            thread.join()
