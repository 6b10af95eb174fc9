"""Parallel calls that may never return, such as those to a hung mount, with a timeout each.

A thread in a system call cannot be terminated. So each call runs on a daemon thread, which does not delay the end of
the interpreter. A call that exceeds its timeout is abandoned: a result that it returns later is disposed of, and its
tier is not called again before it has returned.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from tierfall.core.runtime.threads import InterruptedWaitError, interrupt_of_thread
from tierfall.core.types.errors import TierfallError, UnreachableError

logger = logging.getLogger("tierfall")

POLL_S = 0.005
SLOW_S = 1.0
IDLE_S = 1.0
"""Seconds after which an idle thread ends."""
INTERRUPT_S = 0.1
"""Seconds after which a wait looks whether its thread was interrupted."""
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


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call. Each token is popped by exactly one thread.

    ``end_token``: the call's thread pops it when the call returns, or the waiting thread when it abandons the call.
    ``start_token``: the call's thread pops it before the call, or the waiting thread after an interrupt, which then
    prevents the call. This is needed since an interrupt within ``Thread.start`` leaves open whether a thread starts.
    """

    bound_s: float
    began_s: float
    result: CallResult[Any] = field(default_factory=CallResult)
    start_token: deque[bool] = field(default_factory=lambda: deque((True,)))
    end_token: deque[bool] = field(default_factory=lambda: deque((True,)))
    returned: bool = False


class _Thread:
    """A thread that makes one call after the other: a thread for each would set up torch's own threads each time."""

    idle: ClassVar[deque[_Thread]] = deque()
    """Threads without a call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    @classmethod
    def call(cls, function: Callable[[], None]) -> None:
        """Call a function on an idle thread, or on a new one. Raises RuntimeError if none can be started."""
        thread = _pop(cls.idle)
        if thread is not None:
            thread._calls.put(function)
            return
        thread = cls()
        thread._calls.put(function)
        threading.Thread(target=thread._run, name="tierfall-call", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                function = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self.idle.remove(self)
                    return
                except ValueError:  # another thread has just popped it, and passes it a call
                    function = self._calls.get()
            function()
            del function  # what it references is free
            self.idle.append(self)


os.register_at_fork(after_in_child=_Thread.idle.clear)  # a child has no thread of its parent's


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
        results: dict[str, CallResult[T]] = {}
        try:
            for name, function in calls.items():
                late = self._late.get(name)
                if late is not None and not _has_returned(late, bounds_s[name]):
                    waited_s = time.monotonic() - late.began_s
                    results[name] = _timeout_error(name, doing, waited_s)
                else:
                    made[name] = _Call(bound_s=bounds_s[name], began_s=time.monotonic())
                    _start_call(name, made[name], function, finished, too_late)
            for name in self._wait(made, finished, last_answer_s, doing if log_slow else None):
                is_late = self._late.get(name) is made[name]
                results[name] = (
                    _timeout_error(name, doing, bounds_s[name]) if is_late else made[name].result
                )
        except BaseException:  # Ctrl-C: abandon the calls, and dispose of their results
            for name, call in made.items():
                if _pop(call.start_token):
                    continue
                if _pop(call.end_token):
                    self._late[name] = call
                elif call.result.value is not None and self._late.get(name) is not call:
                    too_late(call.result.value)
            raise
        return {name: results[name] for name in calls}

    def _wait(
        self,
        made: Mapping[str, _Call],
        finished: queue.SimpleQueue[str],
        last_answer_s: Callable[[str], float],
        log_as: str | None,
    ) -> Iterator[str]:
        """Yield each name once its call has returned or is abandoned. Slow ones are logged as ``log_as``, if given."""
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
                if _pop(waiting[name].end_token):  # else it is returning right now
                    self._late[name] = waiting.pop(name)
                    yield name
            if waiting and now_s >= log_s:
                logger.info("%s: still waiting for an answer of %s", log_as, ", ".join(waiting))
                log_s = math.inf
            wait_s = min(log_s - now_s, *(left_s[n] for n in waiting)) if waiting else 0.0
            if interrupt is not None:
                wait_s = min(wait_s, INTERRUPT_S)
            if waiting and (name := _next(finished, wait_s)):
                del waiting[name]
                yield name


def _has_returned(late: _Call, bound_s: float) -> bool:
    """Whether an abandoned call has returned; waits for one that an interrupt abandoned before its timeout."""
    while not late.returned and time.monotonic() < late.began_s + bound_s:
        time.sleep(POLL_S)
    return late.returned


def _pop(items: deque[T]) -> T | None:
    """Pop an element, or None if there is none. Atomic: each goes to one thread."""
    try:
        return items.popleft()
    except IndexError:
        return None


def _next(finished: queue.SimpleQueue[str], timeout_s: float) -> str:
    try:
        return finished.get(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
    except queue.Empty:
        return ""


def _start_call(
    name: str,
    call: _Call,
    function: Callable[[], T],
    finished: queue.SimpleQueue[str],
    too_late: Callable[[T], None],
) -> None:
    def run() -> None:
        if not _pop(call.start_token):
            return
        try:
            result: CallResult[T] = CallResult(value=function())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            result = CallResult(error=error)
        call.result = result
        if _pop(call.end_token):
            finished.put(name)
        elif result.error is None:
            _dispose(name, result, too_late)
        call.returned = True

    try:
        _Thread.call(run)
    except RuntimeError as error:  # none can be started any more, as at the end of the interpreter
        call.start_token.clear()
        call.end_token.clear()
        call.result = CallResult(error=NotAskedError(f"tier {name} was not asked: {error}"))
        call.returned = True
        finished.put(name)


def _dispose(name: str, result: CallResult[T], too_late: Callable[[T], None]) -> None:
    try:
        too_late(result.get())
    except TierfallError as error:
        logger.warning("tier %s answered too late, and could not be closed: %s", name, error)


def _timeout_error(name: str, doing: str, waited_s: float) -> CallResult[Any]:
    text = f"{doing}: tier {name} has not answered for {waited_s:.3g} s"
    return CallResult(error=UnreachableError(text))
