"""The garbage collector does not run inside a save, and runs as before after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tierfall
from tierfall.run.saver import gc_paused


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def fail() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise KeyError


def test_it_is_on_again_after_a_failure() -> None:
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    with gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_what_a_loop_leaves_in_cycles_is_collected_though_it_saves_at_every_step(
    make_config: Callable[..., dict[str, Any]],
) -> None:
    class Left:
        def __init__(self) -> None:
            self.itself = self

    state = {"weights": torch.zeros(10)}
    alive: weakref.WeakSet[Left] = weakref.WeakSet()
    with tierfall.open(make_config(disk={"flush": {"every": 1000}})) as ckpt:
        for step in range(1, 61):
            for _ in range(300):
                alive.add(Left())
            ckpt.save(step, state).captured()
    assert len(alive) < 9_000
