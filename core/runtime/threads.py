"""Work on several threads, which the end of the interpreter does not wait for: one may be in a system call that never
returns.

An interrupt (Ctrl-C) of the thread that waits for them also gives up the bounded calls (``runtime.bounded_calls``) that
they wait for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tierfall.core.runtime.conditions import Conditions

_conditions = Conditions()

K = TypeVar("K")
T = TypeVar("T")
WAKE_S = 1.0
_interrupts = threading.local()


class InterruptedWaitError(BaseException):
    """A call was given up, since the thread that waits for this one was interrupted."""


@contextmanager
def interrupted_by(event: threading.Event) -> Iterator[None]:
    """Give up the bounded calls that this thread waits for in the block once ``event`` is set."""
    _interrupts.event = event
    try:
        yield
    finally:
        del _interrupts.event


def interrupt_of_thread() -> threading.Event | None:
    """Return the event that interrupts this thread, if there is one."""
    return getattr(_interrupts, "event", None)


def run_in_threads(threads: int, do: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Do something for each number, begun in their order, on so many threads; once it fails, no more is begun. If no
    more threads can be started, this one helps those that run.

    Raises a first failure once all threads have stopped.
    """
    work = _SharedWork(threads, do, numbers)
    try:
        for number in range(threads):
            thread = threading.Thread(target=work.run, name=f"tierfall-work-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # At the limit of processes: this thread helps those that have begun.
                work.cancel_starts()
                try:
                    work.do_all()
                except Exception as error:  # noqa: BLE001 - raised below, once the others have stopped
                    work.fail(error)
                break
        work.wait()
    except BaseException:  # Ctrl-C: what waits is not begun
        work.interrupt()
        raise
    if work.failures:
        raise work.failures[0]


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


class _SharedWork:
    """Numbers that several threads share. ``_starts`` has an element for each thread that has not begun."""

    def __init__(self, threads: int, do: Callable[[int], None], numbers: Iterable[int]) -> None:
        self.failures: list[BaseException] = []
        self._do = do
        self._left = iter(numbers)
        self._taking = threading.Lock()
        self._stop = threading.Event()
        self._interrupted = threading.Event()
        self._starts = deque(range(threads))
        self._running = threads
        self._ended: deque[int] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            start = self._starts.popleft()
        except IndexError:  # an interrupt came before
            return
        with interrupted_by(self._interrupted):
            try:
                self.do_all()
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                self.fail(error)
        self._ended.append(start)
        self._wake.put(None)

    def do_all(self) -> None:
        """Do what is left, with the other threads."""
        while (number := self._next()) is not None:
            self._do(number)

    def fail(self, error: BaseException) -> None:
        """Begin no more, as one thread failed with ``error``."""
        self._stop.set()
        self.failures.append(error)

    def _next(self) -> int | None:
        with self._taking:
            return None if self._stop.is_set() else next(self._left, None)

    def wait(self) -> None:
        """Wait until all threads that have begun, or will, have ended."""
        while len(self._ended) < self._running:
            try:
                self._wake.get(timeout=WAKE_S)
            except queue.Empty:  # an interrupt may have taken what was put
                continue

    def cancel_starts(self) -> None:
        """Let no more threads begin."""
        while self._starts:
            try:
                self._starts.pop()
            except IndexError:  # a thread has just begun
                break
            self._running -= 1

    def interrupt(self) -> None:
        """End the threads; what they wait for is given up."""
        self._stop.set()
        self._interrupted.set()
        self.cancel_starts()
        self.wait()


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
