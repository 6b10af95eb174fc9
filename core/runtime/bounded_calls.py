"""Parallel calls that may never return, such as those to a hung mount, with a timeout each.

A thread in a system call cannot be terminated. So each call runs on a daemon thread, which does not delay the end of
the interpreter. A call that exceeds its timeout is abandoned: a result that it returns later is disposed of, and its
tier is not called again before it has returned.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from tierfall.core.runtime.threads import WAKE_S, InterruptedWaitError, interrupt_of_thread
from tierfall.core.types.errors import TierfallError, UnreachableError

logger = logging.getLogger("tierfall")

POLL_S = 0.005
SLOW_S = 1.0
INTERRUPT_S = 0.1
"""Seconds between checks of a wait for an interrupt of its thread."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult(Generic[T]):
    """The value that a call returned, or its error: an UnreachableError after a timeout."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call. After an interrupt in ``Thread.start`` a thread may still start; if ``future`` is cancelled, it makes
    no call."""

    bound_s: float
    began_s: float
    future: Future[Any] = field(default_factory=Future)


class NotAskedError(UnreachableError):
    """No thread could be started for a call."""


class BoundedCalls:
    """Calls by tier name. Not thread-safe."""

    def __init__(self) -> None:
        self._late: dict[str, _Call] = {}

    def call_all(
        self,
        calls: Mapping[str, Callable[[], T]],
        bounds_s: Mapping[str, float],
        *,
        doing: str,
        last_answer_s: Callable[[str], float] = lambda name: -math.inf,
        too_late: Callable[[T], None] = lambda value: None,
        log_slow: bool = False,
    ) -> dict[str, CallResult[T]]:
        """Make all calls in parallel; return their results in the given order.

        A call counts as unreachable ``bounds_s`` seconds after it began, or after its tier last answered another call
        (``last_answer_s``, on the monotonic clock), whichever is later. A value that it returns after that is passed to
        ``too_late`` on the call's own thread. A tier whose previous call has not returned is unreachable at once. With
        ``log_slow``, tiers that have not answered after SLOW_S are logged.
        """
        finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        made: dict[str, _Call] = {}
        waited_s = dict(bounds_s)
        try:
            for name, function in calls.items():
                late = self._late.get(name)
                if late is not None and not _has_returned(late, bounds_s[name]):
                    waited_s[name] = time.monotonic() - late.began_s
                    continue
                call = made[name] = _Call(bound_s=bounds_s[name], began_s=time.monotonic())
                _start_call(name, call.future, function, finished)
            self._wait(made, finished, last_answer_s, too_late, doing if log_slow else None)
        except BaseException:  # Ctrl-C: abandon the calls, and dispose of their results
            for name, call in made.items():
                if not call.future.cancel() and self._late.get(name) is not call:
                    self._abandon(name, call, too_late)
            raise
        return {
            name: _timeout_error(name, doing, waited_s[name])
            if name not in made or self._late.get(name) is made[name]
            else _result(made[name].future)
            for name in calls
        }

    def _wait(
        self,
        made: Mapping[str, _Call],
        finished: queue.SimpleQueue[str],
        last_answer_s: Callable[[str], float],
        too_late: Callable[[T], None],
        log_as: str | None,
    ) -> None:
        """Wait until each call has returned or is abandoned. Slow ones are logged as ``log_as``, if given."""
        waiting = dict(made)
        log_s = math.inf if log_as is None else time.monotonic() + SLOW_S
        interrupt = interrupt_of_thread()
        while waiting:
            if interrupt is not None and interrupt.is_set():
                raise InterruptedWaitError
            now_s = time.monotonic()
            left_s = {
                name: max(call.began_s, last_answer_s(name)) + call.bound_s - now_s
                for name, call in waiting.items()
            }
            for name in [name for name, left in left_s.items() if left <= 0]:
                call = waiting.pop(name)
                if not call.future.done():
                    self._abandon(name, call, too_late)
            if waiting and now_s >= log_s:
                logger.info("%s: still waiting for an answer of %s", log_as, ", ".join(waiting))
                log_s = math.inf
            if waiting:
                wait_s = min(log_s - now_s, *(left_s[name] for name in waiting))
                wait_s = min(wait_s, WAKE_S if interrupt is None else INTERRUPT_S)
                waiting.pop(_next(finished, wait_s), None)

    def _abandon(self, name: str, call: _Call, too_late: Callable[[T], None]) -> None:
        self._late[name] = call
        call.future.add_done_callback(partial(_dispose, name, too_late))


def _has_returned(late: _Call, bound_s: float) -> bool:
    """Whether an abandoned call has returned; waits for one that an interrupt abandoned before its timeout."""
    while not late.future.done() and time.monotonic() < late.began_s + bound_s:
        time.sleep(POLL_S)
    return late.future.done()


def _next(finished: queue.SimpleQueue[str], timeout_s: float) -> str:
    try:
        return finished.get(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
    except queue.Empty:
        return ""


def _start_call(
    name: str, future: Future[T], function: Callable[[], T], finished: queue.SimpleQueue[str]
) -> None:
    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)
        else:
            future.set_result(value)

    future.add_done_callback(lambda _: finished.put(name))
    try:
        threading.Thread(target=run, name="tierfall-call", daemon=True).start()
    except RuntimeError as error:  # none can be started any more, as at the end of the interpreter
        future.set_exception(NotAskedError(f"tier {name} was not asked: {error}"))


def _result(future: Future[T]) -> CallResult[T]:
    error = future.exception()
    return CallResult(value=future.result()) if error is None else CallResult(error=error)


def _dispose(name: str, too_late: Callable[[T], None], future: Future[T]) -> None:
    if future.exception() is not None:
        return
    try:
        too_late(future.result())
    except TierfallError as error:
        logger.warning("tier %s answered too late, and could not be closed: %s", name, error)


def _timeout_error(name: str, doing: str, waited_s: float) -> CallResult[Any]:
    text = f"{doing}: tier {name} has not answered for {waited_s:.3g} s"
    return CallResult(error=UnreachableError(text))
