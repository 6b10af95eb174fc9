"""The threads of a restore share the work."""

from __future__ import annotations

import threading
import time

import pytest

from tierfall.core.runtime.threads import run_in_threads

PATIENCE_S = 20.0


def test_after_a_failure_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def fail(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise KeyError(number)

    with pytest.raises(KeyError, match="2"):
        run_in_threads(1, fail, range(10))
    assert begun == [0, 1, 2]


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
