"""Rates of calls, on a clock that only sleeping moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from backend_places import get, put

from tests.memory_backend import MemoryBackend
from tierfall.backends.wrappers import Retrying, RetryPolicy, Wrapper, WriterWrapper
from tierfall.core.runtime.rate_limit import SLICE_BYTES_MIN, RateLimiter
from tierfall.core.types.backend import Backend, Traits, Writer


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        assert wait_s > 0
        self.now_s += wait_s


class Watched(Wrapper):
    """Writes down what it is asked, and tells at each call."""

    def __init__(self, inner: Backend, traits: Traits | None = None) -> None:
        super().__init__(inner)
        self.seen: list[tuple[str, int, int]] = []
        self.at_call: Callable[[], object] = lambda: None
        self._traits = traits or inner.traits

    @property
    def traits(self) -> Traits:
        return self._traits

    def see(self, operation: str, offset: int = 0, size_bytes: int = 0) -> None:
        self.seen.append((operation, offset, size_bytes))
        self.at_call()

    def only(self, operation: str) -> list[tuple[int, int]]:
        return [(offset, size) for name, offset, size in self.seen if name == operation]

    def create(self, key: str, **words: Any) -> Writer:
        self.see("create")
        return WatchedWriter(super().create(key, **words), self)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        self.see("read", offset, view.nbytes)
        super().read_into(key, offset, view)


class WatchedWriter(WriterWrapper):
    def __init__(self, inner: Writer, watched: Watched) -> None:
        super().__init__(inner)
        self._watched = watched

    def write(self, offset: int, view: memoryview) -> None:
        self._watched.see("write", offset, view.nbytes)
        super().write(offset, view)


RATE = 40 * SLICE_BYTES_MIN
SLICE = 2 * SLICE_BYTES_MIN


def limited_both_ways(inner: Backend, rate: int, clock: Clock) -> Backend:
    """Limit each direction to one rate."""
    limits = {name: RateLimiter(rate, clock, clock.sleep) for name in ("writes", "reads")}
    return Retrying(inner, RetryPolicy(), **limits)


def test_a_write_advances_in_even_slices() -> None:
    clock, times = Clock(), []
    watched = Watched(MemoryBackend())
    watched.at_call = lambda: times.append(clock.now_s)
    limited = limited_both_ways(watched, RATE, clock)
    data = bytes(range(256)) * (5 * SLICE // 256) + b"tail"
    put(limited, "run/key", data)
    assert watched.only("write") == [(start * SLICE, SLICE) for start in range(5)] + [
        (5 * SLICE, 4)
    ]
    assert times[1:] == pytest.approx([100.0 + SLICE / RATE * number for number in range(6)])
    assert get(limited, "run/key") == data


def test_idle_time_earns_no_burst() -> None:
    clock = Clock()
    limited = limited_both_ways(MemoryBackend(), RATE, clock)
    clock.now_s += 1000
    start_s = clock.now_s
    put(limited, "run/key", bytes(10 * SLICE))
    assert clock.now_s - start_s == pytest.approx(9 * SLICE / RATE)


def test_writers_share_the_rate_and_readers_have_their_own() -> None:
    clock = Clock()
    limited = limited_both_ways(MemoryBackend(), RATE, clock)
    put(limited, "run/a", bytes(4 * SLICE))
    put(limited, "run/b", bytes(4 * SLICE))
    assert clock.now_s == pytest.approx(100 + 7 * SLICE / RATE)
    get(limited, "run/a")
    assert clock.now_s == pytest.approx(100 + 11 * SLICE / RATE), "the first one waits, too"
    get(limited, "run/b")
    assert clock.now_s == pytest.approx(100 + 15 * SLICE / RATE)


def test_a_read_is_one_call() -> None:
    """In two, the object could be replaced in between."""
    clock = Clock()
    watched = Watched(MemoryBackend())
    limited = limited_both_ways(watched, 1000, clock)
    put(watched, "run/key", bytes(4 * SLICE))
    watched.seen.clear()
    get(limited, "run/key")
    assert watched.only("read") == [(0, 4 * SLICE)]


@pytest.mark.parametrize("change", [{"part_bytes_min": 100}, {"ordered_writes": True}])
def test_a_write_is_not_cut_where_that_would_break_a_rule(change: dict[str, int]) -> None:
    clock = Clock()
    memory = MemoryBackend()
    watched = Watched(memory, replace(memory.traits, **change))  # type: ignore[arg-type]
    limited = limited_both_ways(watched, RATE, clock)
    with limited.create("run/key") as writer:
        writer.write(0, memoryview(bytes(4 * SLICE)))
        writer.write(4 * SLICE, memoryview(bytes(SLICE)))
        writer.publish()
    assert watched.only("write") == [(0, 4 * SLICE), (4 * SLICE, SLICE)]
    assert clock.now_s == pytest.approx(100 + 4 * SLICE / RATE)
