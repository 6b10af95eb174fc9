"""``interval`` in a training loop: its default, saves on a signal, and the last step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tierfall
from tests.core.ranks.threads import on_all
from tests.steps import state_of
from tierfall.core.types.errors import ConfigError

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does to signals, the next one finds them as they were."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


# Signals -----------------------------------------------------------------------------------------


def test_a_handler_that_was_put_in_ours_place_stays_and_goes_on_through_ours(
    make_config: MakeConfig,
) -> None:
    told: list[str] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append("first"))
    config = {**make_config(), "interval": {"every": 10**6, "on_signal": ["SIGUSR1"]}}
    with tierfall.open(config) as ckpt:
        ours = signal.getsignal(signal.SIGUSR1)
        assert callable(ours)

        def theirs(number: int, frame: Any) -> None:
            told.append("theirs")
            ours(number, frame)

        signal.signal(signal.SIGUSR1, theirs)
        ckpt.maybe_save(1, state_of(1))
    assert signal.getsignal(signal.SIGUSR1) is theirs
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == ["theirs", "first"]
    with tierfall.open(config):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert told == ["theirs", "first"] * 2, "ours is in the chain twice"
    assert signal.getsignal(signal.SIGUSR1) is theirs


def test_an_open_that_fails_leaves_signals_as_they_were(make_config: MakeConfig) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    config = {**make_config(), "interval": {"on_signal": ["SIGUSR2"]}}
    with tierfall.open(config):
        held = signal.getsignal(signal.SIGUSR2)
        with pytest.raises(ConfigError, match="second Checkpointer"):
            tierfall.open(config)
        assert signal.getsignal(signal.SIGUSR2) == held
    assert signal.getsignal(signal.SIGUSR2) == before


def test_signals_are_the_main_threads(make_config: MakeConfig) -> None:
    config = {**make_config(), "interval": {"on_signal": ["SIGUSR1"]}}
    (error,) = on_all([lambda: tierfall.open(config)])
    assert isinstance(error, ConfigError)
    assert "interval.on_signal: only the main thread" in str(error)
    before = signal.getsignal(signal.SIGUSR1)
    ckpt = tierfall.open(config)
    assert on_all([ckpt.close]) == [None]
    assert signal.getsignal(signal.SIGUSR1) != before
