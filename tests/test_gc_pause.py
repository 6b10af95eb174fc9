"""The garbage collector does not run inside a save, and runs as before after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tierfall
from tierfall.errors import CaptureError


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_after_a_save_that_fails_it_is_on_or_off_as_before(
    make_config: Callable[..., dict[str, Any]], on: bool
) -> None:
    (gc.enable if on else gc.disable)()
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(CaptureError):
            ckpt.save(1, {"w": object()})
        assert gc.isenabled() is on


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
