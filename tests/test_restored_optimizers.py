"""Optimizers after a restore: what load_state_dict does at its end, factored moments of a resized parameter, and the
warning about a parameter that is stepped and not saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = KINDS[kind](model.parameters())
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_an_older_torch_saved_as_numbers_are_what_load_state_dict_makes_of_them(
    make_config: MakeConfig, kind: str
) -> None:
    model, optimizer = trained(kind, 2)
    for state in optimizer.state.values():
        state["step"] = state["step"].item()
    expected_model, expected = trained(kind, 0)
    expected_model.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    one_step(expected_model, expected)
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, block=True)
        live, moments = trained(kind, 0)
        ckpt.restore({"model": live, "optimizer": moments})
    one_step(live, moments)
    assert all(map(torch.equal, live.parameters(), expected_model.parameters()))


def test_the_setstate_of_a_class_sees_what_was_restored(make_config: MakeConfig) -> None:
    seen: list[tuple[float, int]] = []

    class Own(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            (group,) = self.param_groups
            seen.append((group["lr"], len(self.state)))

    model = nn.Linear(2, 2)
    with tierfall.open(make_config()) as ckpt:
        saved = Own(model.parameters(), lr=0.5, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        saved.step()
        ckpt.save(1, {"model": model, "optimizer": saved}, block=True)
        seen.clear()
        ckpt.restore({"model": model, "optimizer": Own(model.parameters(), lr=0.1, momentum=0.9)})
    assert seen == [(0.5, 2)]


# Moments of a resized parameter ----------------------------------------------------------------------


class Factored(torch.optim.Optimizer):
    """Rows and columns without the dimension that they are the mean of, as in transformers' Adafactor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            square = parameter.detach().square() + 1
            state["count"], state["rows"] = torch.tensor(2.0), square.mean(-1)
            state["whole"], state["columns"] = square, square.mean(-2)


def words(number: int, kind: Any, width: int = 4) -> dict[str, Any]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Embedding(number, width))
    return {"model": model, "optimizer": kind(model.parameters())}


def look_up(state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model(torch.arange(len(model[0].weight))).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_moment_whose_dimension_may_be_either_is_refused_by_name(make_config: MakeConfig) -> None:
    saved, live = words(4, Factored), words(6, Factored)  # of 4 words and 4 columns
    look_up(saved)
    name = "optimizer.state.model.0.weight.columns"
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, saved, block=True)
        with pytest.raises(RestoreError, match=name.replace(".", r"\.")) as caught:
            ckpt.restore(live, resize=["model.0"])
        assert f"skip=[{name!r}]" in str(caught.value)
        assert live["optimizer"].state == {}
        ckpt.restore(live, resize=["model.0"], skip=["optimizer.state.model.0"])


# A parameter that no entry holds ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_the_optimizer_of_a_model_that_is_not_initialized_yet_is_refused_by_name(
    make_config: MakeConfig,
) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    model(torch.ones(1, 4))
    optimizer = KINDS["Adam"](model.parameters())
    one_step(model, optimizer)
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, block=True)
    live = nn.Sequential(nn.LazyLinear(4))
    state = {"model": live, "optimizer": KINDS["Adam"](live.parameters())}
    with (
        tierfall.open(make_config()) as ckpt,
        pytest.raises(RestoreError, match=r"model\.0\.weight.*uninitialized"),
    ):
        ckpt.restore(state)
