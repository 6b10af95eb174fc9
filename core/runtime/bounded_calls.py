"""Calls that may never return, as those to a mount that hangs, made side by side and waited for with a bound.

A thread in a system call cannot be ended. So each call has a daemon thread, which does not hold up the end of the
interpreter, and one that does not answer in time is left behind. What it returns later is handed to whoever can dispose
of it, and its tier is not called again before it has returned.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tierfall.core.types.errors import TierfallError, UnreachableError

logger = logging.getLogger("tierfall")

POLL_S = 0.005
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult(Generic[T]):
    """What a call returned, or the error that it raised: an UnreachableError where it did not answer in time."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@dataclass(slots=True, kw_only=True)
class _Call:
    """``turn`` holds one token: the call's thread takes it when it ends, or the one that waits when it gives up.

    ``start`` holds another: the call's thread takes it before it calls, or the one that an interrupt reaches, and then
    nothing is called. An interrupt within ``Thread.start`` does not tell whether there will be a thread.
    """

    bound_s: float
    began_s: float
    answer: CallResult[Any] = field(default_factory=CallResult)
    start: deque[bool] = field(default_factory=lambda: deque((True,)))
    turn: deque[bool] = field(default_factory=lambda: deque((True,)))
    over: bool = False


class BoundedCalls:
    """Calls by the name of the tier that each is made to. To be used by one thread at a time."""

    def __init__(self) -> None:
        self._late: dict[str, _Call] = {}

    def make(
        self,
        calls: Mapping[str, Callable[[], T]],
        bounds_s: Mapping[str, float],
        *,
        doing: str,
        heard_s: Callable[[str], float] = lambda name: -math.inf,
        too_late: Callable[[T], None] = lambda value: None,
    ) -> dict[str, CallResult[T]]:
        """Make all calls at once, and return what became of each, in the order given.

        One that does not return in ``bounds_s`` seconds, nor in as many since its tier last answered anything
        (``heard_s``, on the monotonic clock), counts as unreachable; ``too_late`` gets, in the call's own thread, what
        it returns after that. A tier whose last call has not returned is unreachable at once.
        """
        finished: queue.SimpleQueue[str] = queue.SimpleQueue()
        made: dict[str, _Call] = {}
        answers: dict[str, CallResult[T]] = {}
        try:
            for name, function in calls.items():
                late = self._late.get(name)
                if late is not None and not _has_returned(late, bounds_s[name]):
                    waited_s = time.monotonic() - late.began_s
                    answers[name] = _timeout_error(name, doing, waited_s)
                else:
                    made[name] = _Call(bound_s=bounds_s[name], began_s=time.monotonic())
                    _start_call(name, made[name], function, finished, too_late)
            for name in self._wait(made, finished, heard_s):
                is_late = self._late.get(name) is made[name]
                answers[name] = (
                    _timeout_error(name, doing, bounds_s[name]) if is_late else made[name].answer
                )
        except BaseException:  # Ctrl-C: what they return is disposed of
            for name, call in made.items():
                if _take(call.start):
                    continue
                if _take(call.turn):
                    self._late[name] = call
                elif call.answer.value is not None and self._late.get(name) is not call:
                    too_late(call.answer.value)
            raise
        return {name: answers[name] for name in calls}

    def _wait(
        self,
        made: Mapping[str, _Call],
        finished: queue.SimpleQueue[str],
        heard_s: Callable[[str], float],
    ) -> Iterator[str]:
        """Give each name once its call is over, or is left behind."""
        waiting = dict(made)
        while waiting:
            now_s = time.monotonic()
            left_s = {
                name: max(call.began_s, heard_s(name)) + call.bound_s - now_s
                for name, call in waiting.items()
            }
            for name in [name for name, left in left_s.items() if left <= 0]:
                if _take(waiting[name].turn):  # else it ends just now
                    self._late[name] = waiting.pop(name)
                    yield name
            if waiting and (name := _next(finished, min(left_s[n] for n in waiting))):
                del waiting[name]
                yield name


def _has_returned(late: _Call, bound_s: float) -> bool:
    """Say whether a call that was left behind is over. One that an interrupt left a moment ago has its time to end."""
    while not late.over and time.monotonic() < late.began_s + bound_s:
        time.sleep(POLL_S)
    return late.over


def run_in_parallel(do: Callable[[K], T], items: Iterable[K], *, parallel: int) -> list[T]:
    """Do something for each item, so many at a time, and return what it gave, in their order. Raises the first failure
    once all that was begun has ended."""
    given = list(items)
    left = deque(range(len(given)))
    values: dict[int, T] = {}
    failures: list[BaseException] = []
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        try:
            while not failures and (number := _take(left)) is not None:
                values[number] = do(given[number])
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failures.append(error)
        finally:
            done.put(None)

    threads = min(parallel, len(given))
    for _ in range(threads - 1):
        threading.Thread(target=work, name="tierfall-side-by-side", daemon=True).start()
    work()
    for _ in range(max(threads, 1)):
        done.get()
    if failures:
        raise failures[0]
    return [values[number] for number in range(len(given))]


def _take(left: deque[T]) -> T | None:
    """Take the next one, or None where none is left: one thread gets each."""
    try:
        return left.popleft()
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
        if not _take(call.start):
            return
        try:
            answer: CallResult[T] = CallResult(value=function())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits as it is
            answer = CallResult(error=error)
        call.answer = answer
        if _take(call.turn):
            finished.put(name)
        elif answer.error is None:
            _dispose(name, answer, too_late)
        call.over = True

    threading.Thread(target=run, name=f"tierfall-call-{name}", daemon=True).start()


def _dispose(name: str, answer: CallResult[T], too_late: Callable[[T], None]) -> None:
    try:
        too_late(answer.get())
    except TierfallError as error:
        logger.warning("tier %s answered too late, and could not be let go: %s", name, error)


def _timeout_error(name: str, doing: str, waited_s: float) -> CallResult[Any]:
    text = f"{doing}: tier {name} has not answered for {waited_s:.3g} s"
    return CallResult(error=UnreachableError(text))
