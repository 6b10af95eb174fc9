"""A tier that works again when the end is near gets what it is owed: no wait between two tries outlasts the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import state_of, steps_on, wait_until

MakeConfig = Callable[..., dict[str, Any]]


def chain_to(store: MemoryStore, make_config: MakeConfig, **words: Any) -> dict[str, Any]:
    """Host memory above the store."""
    config = make_config(**words)
    return {**config, "tiers": [config["tiers"][0], store.tier()]}


def save_in_vain(ckpt: tierfall.Checkpointer, store: MemoryStore, step: int) -> None:
    """Save a step while the store refuses all; return once it is waiting for a later try."""
    store.refuse_all()
    handle = ckpt.save(step, state_of(step))
    wait_until(lambda: handle.exception() is not None, "the tier is reported as failing")


def test_drain_and_close_try_a_tier_at_once_that_works_again(
    store: MemoryStore, make_config: MakeConfig
) -> None:
    ckpt = tierfall.open(chain_to(store, make_config, max_wait="20s"))
    ckpt.save(1, state_of(1), block=True)

    save_in_vain(ckpt, store, 2)
    began = time.monotonic()
    assert ckpt.drain().left == ((2, 1, "store"),), "it is tried once, without a deadline"
    assert time.monotonic() - began < 10

    store.heal()
    assert ckpt.drain().left == (), "one that works now needs no deadline"

    save_in_vain(ckpt, store, 3)
    store.heal()
    assert ckpt.drain(deadline=20).left == ()

    save_in_vain(ckpt, store, 4)
    store.heal_after_refusals(2)
    assert ckpt.drain(deadline=60).left == (), "it is tried again until the deadline"

    save_in_vain(ckpt, store, 5)
    store.heal()
    ckpt.close()
    assert store.steps() == [1, 2, 3, 4, 5]


def test_a_copy_that_never_fits_keeps_no_close_waiting(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    ckpt = tierfall.open(make_config(max_wait="60s", disk={}, small={"capacity": "400KiB"}))
    ckpt.save(1, state_of(1), block=True)
    ckpt.save(2, state_of(2, elements=200_000)).wait("disk")
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 30
    assert steps_on(tmp_path / "small") == [1]


def test_a_drain_by_signal_tries_a_tier_that_fails_until_its_deadline(
    store: MemoryStore, make_config: MakeConfig
) -> None:
    had_its_effect: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: had_its_effect.append(number))
    config = chain_to(store, make_config, max_wait="20s")
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "60s"}
    try:
        with tierfall.open(config) as ckpt:
            ckpt.save(1, state_of(1), block=True)
            save_in_vain(ckpt, store, 2)
            store.heal_after_refusals(2)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: bool(had_its_effect), "the drain has ended", timeout_s=60)
            assert store.steps() == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, previous)
