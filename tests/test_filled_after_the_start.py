"""A place of the state that is empty in a fresh program takes what the checkpoint has there, new tensors included."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]


def fresh() -> dict[str, Any]:
    """What the program makes at its start."""
    return {
        "model": nn.Linear(2, 2),
        "best": None,
        "average": None,
        "replay": [],
        "pair": (),
        "slots": [None, None],
        "buffers": {},
        "ordered": OrderedDict(),
        "either": [],
        "extra": {"epoch": 0, "inner": {"seen": []}, "log": [0.5]},
        "held": tierfall.item(None, changes="anytime"),
    }


def fill(state: dict[str, Any]) -> None:
    """What it has put there by its first save."""
    state["best"] = {"weight": torch.ones(2, 2), "scores": [1, torch.full((3,), 2.0)], "none": None}
    state["average"] = torch.tensor(0.25)
    state["replay"] += [torch.arange(3.0), {"observation": torch.ones(1, 2), "reward": 1.5}]
    state["pair"] = (torch.ones(1), "text")
    state["slots"][1] = torch.arange(4)
    state["buffers"] |= {"observations": torch.ones(5, 2), 3: torch.zeros(1), "size": 5}
    state["ordered"]["z"] = torch.tensor([True])
    state["either"] = {"mask": torch.tensor([True, False])}
    state["extra"]["epoch"] = 4
    state["extra"]["inner"]["seen"].append(torch.arange(2))
    state["extra"]["inner"]["centre"] = torch.ones(2)
    state["extra"]["log"].append(torch.tensor(0.25))
    state["held"].value = [torch.full((2,), 7.0)]


def plain(value: Any) -> Any:
    """A value with tensors as lists, and without the wrappers of ``item``."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return plain(value.value) if hasattr(value, "changes") else value


def without_model(state: dict[str, Any]) -> Any:
    return plain({key: value for key, value in state.items() if key != "model"})


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """Step 1 of the state of a program, filled."""
    config: dict[str, Any] = make_config()
    state = fresh()
    fill(state)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    return config


def test_an_object_is_not_made_of_its_state_and_tensors_of_the_state_stay_compared(
    config: dict[str, Any],
) -> None:
    """None in place of a module, a missing key of the state itself, and a container that holds tensors already."""
    with tierfall.open(config) as ckpt:
        for key, other, name in (
            ("model", None, "model"),
            ("buffers", {"observations": torch.zeros(5, 2)}, "buffers.size"),
            ("replay", [torch.zeros(3)], "replay.1"),
            ("average", 0.0, "average"),
        ):
            state = {**fresh(), key: other}
            with pytest.raises(RestoreError, match=name.replace(".", r"\.")):
                ckpt.restore(state)
            assert state["best"] is None  # nothing is assigned
        lacking = fresh()
        del lacking["best"]
        with pytest.raises(RestoreError, match="best"):
            ckpt.restore(lacking)


def test_going_back_empties_what_was_empty_then_if_the_program_empties_it(
    make_config: MakeConfig,
) -> None:
    with tierfall.open(make_config()) as ckpt:
        state = fresh()
        ckpt.save(1, state, block=True)
        fill(state)
        ckpt.save(2, state, block=True)
        with pytest.raises(RestoreError, match="None, or an empty"):
            ckpt.restore(state, step=1)
        empty = {key: value for key, value in fresh().items() if key != "model"}
        ckpt.restore({**state, **empty}, step=1)
    assert without_model(empty) == without_model(fresh())
