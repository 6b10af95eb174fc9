"""Drain towards a deadline, by a call and by a signal: the forecast matches what is flushed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import state_of, steps_on, wait_until
from tierfall.core.types.values import SaveOutcome

MakeConfig = Callable[..., dict[str, Any]]
ELEMENTS = 200_000
"""An image of 0.86 MB: a second at 860 kB/s."""


def large(step: int) -> dict[str, Any]:
    return state_of(step, elements=ELEMENTS)


# Signals ---------------------------------------------------------------------------------------------


def test_signals_are_let_go_of_at_the_close_and_may_be_listened_to_again(
    make_config: MakeConfig,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    config = make_config()
    config["drain"] = {"on_signal": ["SIGUSR1"]}
    for _ in range(2):
        with tierfall.open(config, fresh=True) as ckpt:
            assert signal.getsignal(signal.SIGUSR1) is not before
            ckpt.save(1, state_of(1))
        assert signal.getsignal(signal.SIGUSR1) is before


@pytest.fixture
def called(make_config: MakeConfig) -> Iterator[threading.Event]:
    """Set by the user's handler, which a drain on SIGUSR1 lets run once it is over."""
    called = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.set())
    yield called
    signal.signal(signal.SIGUSR1, before)


def saving_on_signal(config: dict[str, Any]) -> dict[str, Any]:
    """One signal asks for a save and for a drain, whose deadline no test waits for."""
    config["interval"] = {"every": 10**6, "on_signal": ["SIGUSR1"]}
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "10m"}
    return config


def test_a_save_that_the_signal_asks_for_is_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    """One signal asks for a save at the next step, and for a drain, which takes that save along."""
    with tierfall.open(saving_on_signal(make_config())) as ckpt:
        ckpt.save(1, state_of(1))
        assert ckpt.maybe_save(2, state_of(2)) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not called.wait(0.5), "it was over before the save"
        handle = ckpt.maybe_save(3, state_of(3))
        assert handle is not None
        wait_until(called.is_set, "the drain is over")
        assert handle.done("disk")


def test_a_save_that_the_signal_asks_for_and_that_is_skipped_is_not_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    host = {"capacity": "1200KiB", "when_full": "skip"}
    config = make_config(disk={"bandwidth": "900kB/s"}, host=host)
    with tierfall.open(saving_on_signal(config)) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = ckpt.maybe_save(2, large(2))
        assert handle is not None
        assert handle.outcome is SaveOutcome.SKIPPED
        wait_until(called.is_set, "the drain is over")
        assert steps_on(Path(config["tiers"][-1]["path"])) == [1]


def test_a_drain_that_meets_a_close_lets_it_end(
    make_config: MakeConfig, called: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"}, max_wait="20s")
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "20s"}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(called.is_set, "the handler was called after the close")
    assert "what was to be done on SIGUSR1 failed" not in caplog.text


def test_a_drain_by_signal_tries_a_tier_that_fails_until_its_deadline(
    store: MemoryStore, make_config: MakeConfig, called: threading.Event
) -> None:
    config = make_config(max_wait="20s")
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "60s"}
    config["tiers"] = [config["tiers"][0], store.tier()]
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        store.refuse_all()
        handle = ckpt.save(2, state_of(2))
        wait_until(lambda: handle.exception() is not None, "the tier is reported as failing")
        store.heal_after_refusals(2)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(called.is_set, "the drain has ended", timeout_s=60)
        assert store.steps() == [1, 2]
