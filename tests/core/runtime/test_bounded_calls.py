"""Calls that may never return: they run in parallel and are waited for no longer than their bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tierfall.core.runtime.bounded_calls import BoundedCalls
from tierfall.core.types.errors import UnreachableError

SHORT_S = 0.05
LONG_S = 30.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs, until the test ends."""
    event = threading.Event()
    yield event
    event.set()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_tier_is_not_called_again_before_its_last_call_has_returned(
    gate: threading.Event,
) -> None:
    calls, asked = BoundedCalls(), []

    def ask() -> int:
        asked.append(1)
        gate.wait()
        return len(asked)

    assert calls.call_all({"t": ask}, {"t": SHORT_S}, doing="list")["t"].error is not None
    again = calls.call_all({"t": ask}, {"t": SHORT_S}, doing="list")["t"]
    assert isinstance(again.error, UnreachableError)
    assert len(asked) == 1
    gate.set()
    until(lambda: calls.call_all({"t": lambda: 7}, {"t": LONG_S}, doing="list")["t"].value == 7)


def test_a_call_that_an_interrupt_left_has_its_time_to_end() -> None:
    """Ctrl-C in the middle of a call, and the next one a moment later."""
    calls = BoundedCalls()
    ended = threading.Event()
    begun = threading.Event()

    def slow() -> str:
        begun.set()
        ended.wait(LONG_S)
        return "old"

    def interrupt(name: str) -> float:
        begun.wait(LONG_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls.call_all({"a": slow}, {"a": LONG_S}, doing="list", last_answer_s=interrupt)
    threading.Timer(SHORT_S, ended.set).start()
    found = calls.call_all({"a": lambda: "new"}, {"a": LONG_S}, doing="list")
    assert found["a"].get() == "new"


def test_a_tier_that_goes_on_answering_is_waited_for_beyond_the_bound() -> None:
    last_s, polls = [time.monotonic()], []

    def last_answer_s(name: str) -> float:
        return last_s[0]

    def read_all() -> int:
        for _ in range(12):
            time.sleep(0.02)
            last_s[0] = time.monotonic() + 0.5  # as if the answer had come a moment ago
            polls.append(1)
        return len(polls)

    found = BoundedCalls().call_all(
        {"t": read_all}, {"t": 0.1}, doing="list", last_answer_s=last_answer_s
    )
    assert found["t"].get() == 12
