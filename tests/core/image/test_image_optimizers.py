"""Optimizers: named by parameter, restored tensor by tensor in the dtype that was saved, groups by value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from image_help import make_image, restore
from torch import nn

from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import CaptureError, RestoreError

OPTIMIZERS: dict[str, Any] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def make(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, OPTIMIZERS[name](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(5, 3, generator=generator).to(next(model.parameters()).dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(other) is torch.Tensor and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def grouped(
    model: nn.Sequential, *, turned: bool = False, split: bool = True
) -> torch.optim.Optimizer:
    weights = [model[0].weight, model[2].weight]
    biases = [model[0].bias, model[2].bias]
    if not split:
        return torch.optim.SGD([*weights, *biases], lr=0.5, momentum=0.9)
    groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.2, "weight_decay": 0.0}]
    if turned:
        groups = [{"params": biases[::-1], "lr": 7.0}, {"params": weights[::-1], "lr": 8.0}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def test_groups_in_another_order_are_refused_where_a_scheduler_goes_by_their_places() -> None:
    def state(*, turned: bool) -> dict[str, Any]:
        model, _ = make("SGD", 0)
        optimizer = grouped(model, turned=turned)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "optimizer": optimizer, "more": {"scheduler": scheduler}}

    image, _ = make_image(state(turned=False))
    with pytest.raises(RestoreError, match=r"the groups are in another order, \[1, 0\]"):
        restore(state(turned=True), image)
    restore(state(turned=False), image)


def test_groups_that_hold_other_parameters_are_refused() -> None:
    model, _ = make("SGD", 0)
    image, _ = make_image({"model": model, "optimizer": grouped(model), "rng": None})
    target, _ = make("SGD", 1)
    with pytest.raises(RestoreError, match=r"optimizer\.param_groups\.0: no parameter group"):
        restore({"model": target, "optimizer": grouped(target, split=False), "rng": None}, image)
    fewer = torch.optim.SGD([model[0].weight, model[2].weight])
    more_image, _ = make_image({"model": model, "optimizer": fewer, "rng": None})
    with pytest.raises(RestoreError, match="1 groups, the state has 2: create"):
        restore({"model": target, "optimizer": grouped(target), "rng": None}, more_image)


def test_without_names_groups_meet_by_place() -> None:
    model, optimizer = make("SGD", 0)
    step(model, optimizer, 0)
    image, _ = make_image({"optimizer": optimizer, "rng": None})
    target, other = make("SGD", 1)
    restore({"optimizer": other, "rng": None}, image)
    assert same(optimizer.state_dict(), other.state_dict())
    restore({"optimizer": other, "model": target, "rng": None}, image, only=["optimizer"])
    with pytest.raises(RestoreError, match=r"groups of \[4\].*groups of \[2, 2\]"):
        restore({"optimizer": grouped(target), "rng": None}, image)


def test_a_part_of_an_optimizer_can_be_restored() -> None:
    model, optimizer = make("SGD", 0)
    step(model, optimizer, 0)
    image, _ = make_image({"model": model, "optimizer": optimizer, "rng": None})
    saved = copy.deepcopy(optimizer.state[model[0].weight]["momentum_buffer"])
    step(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 9
    others = copy.deepcopy(optimizer.state[model[2].weight]["momentum_buffer"])
    weight = model[0].weight.clone()
    state = {"model": model, "optimizer": optimizer, "rng": None}
    restore(state, image, only=["optimizer.state.model.0.weight"])
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], saved)
    assert torch.equal(optimizer.state[model[2].weight]["momentum_buffer"], others)
    assert torch.equal(model[0].weight, weight)
    assert optimizer.param_groups[0]["lr"] == 9
    restore(state, image, only=["optimizer.param_groups"])
    assert optimizer.param_groups[0]["lr"] == 0.1


class Counting(torch.optim.SGD):
    """Not stock: tells its state in its own way."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "buffer": torch.full((2,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["buffer"].tolist() == [self.count] * 2


def test_optimizer_with_its_own_state_dict_is_asked() -> None:
    model = nn.Linear(1, 1)
    source, target = Counting(model.parameters()), Counting(model.parameters())
    source.count = 5
    image, _ = make_image({"optimizer": source, "rng": None})
    restore({"optimizer": target, "rng": None}, image)
    assert target.count == 5
    assert walk_state({"optimizer": source}).optimizers == (source,)


def test_an_optimizer_whose_ranks_keep_parts_without_names_is_refused_with_what_to_use() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("call consolidate_state_dict")

    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters())
    with pytest.raises(CaptureError, match=r'state\["optimizer"\] is a Zero.*fully_shard'):
        walk_state({"optimizer": optimizer})
