"""A snapshot is whole or it is given up by name, whatever the program did to its state while it was captured."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.crash import disturbed
from tests.crash.disturbed import SCENARIOS, Loop
from tierfall.core.types.errors import StateChangedError

ROUNDS = 1
TORTURE_ROUNDS = 100
QUICK = (
    disturbed.AveragesSwappedIn,
    disturbed.WrittenByNumPy,
    disturbed.DataReplaced,
    disturbed.StoragesFreed,
    disturbed.MomentsWritten,
    disturbed.OneElement,
)
"""One of each kind."""
SAVES = 2
"""So many saves of one process: after two that were given up in a row, a third would capture nothing lazily."""

MakeConfig = Callable[..., dict[str, Any]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def live_through(scenario: type[Loop], config: dict[str, Any], folder: Path, attempt: int) -> int:
    """Save a few times, disturb the state behind each, and compare every checkpoint with what was there at its save;
    return how many saves were lazy."""
    loop = scenario()
    wanted, handles = {}, {}
    with tierfall.open({**config, "capture": {"verify": scenario.verify}}) as ckpt:
        loop.step()
        ckpt.save(1, loop.state, block=True)
        for step in range(2, 2 + SAVES):
            loop.step()
            wanted[step] = loop.tensors()
            handles[step] = ckpt.save(step, loop.state)
            loop.disturb(attempt * SAVES + step)
            loop.step()
    for step, handle in handles.items():
        if handle.exception() is not None:
            assert isinstance(handle.exception(), StateChangedError)
            continue
        state = tierfall.load(folder, step=step)
        for path, tensor in wanted[step].items():
            found = reduce(getitem, path, state)
            assert torch.equal(bits(found), bits(tensor)), f"step {step} is torn: {path}"
    return sum(handle.stats.lazy for handle in handles.values())


def in_rounds(scenario: type[Loop], make_config: MakeConfig, folder: Path, rounds: int) -> None:
    lazy = 0
    for attempt in range(rounds):
        config = make_config(host={"capacity": "128MiB"}, disk={"path": str(folder / str(attempt))})
        lazy += live_through(scenario, config, folder / str(attempt), attempt)
        shutil.rmtree(folder / str(attempt))
    assert lazy >= rounds, "these saves show nothing: they were not lazy"


@pytest.mark.parametrize("scenario", QUICK)
def test_a_checkpoint_is_what_the_state_was_at_its_save(
    make_config: MakeConfig, tmp_path: Path, scenario: type[Loop]
) -> None:
    in_rounds(scenario, make_config, tmp_path, ROUNDS)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_hundred_times_a_checkpoint_is_what_the_state_was_at_its_save(
    make_config: MakeConfig, tmp_path: Path, scenario: type[Loop]
) -> None:
    in_rounds(scenario, make_config, tmp_path, TORTURE_ROUNDS)
