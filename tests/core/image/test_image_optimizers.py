"""Optimizers: named by parameter, restored tensor by tensor in the dtype that was saved, groups by value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_help import make_image, restore
from torch import nn

from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import CaptureError, RestoreError

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
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


def test_state_is_saved_in_its_dtype_and_missing_state_is_allocated() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    step_count = torch.tensor(3.0)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": step_count.clone(),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    image, _ = make_image({"model": model, "optimizer": optimizer, "rng": None})
    target = nn.Linear(2, 2).bfloat16()
    other = torch.optim.AdamW(target.parameters())
    restore({"model": target, "optimizer": other, "rng": None}, image)
    assert other.state[target.weight]["exp_avg"].dtype is torch.float32
    assert same(optimizer.state_dict(), other.state_dict())
    for state in other.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    restore({"model": target, "optimizer": other, "rng": None}, image)
    assert same(optimizer.state_dict(), other.state_dict())


def test_state_that_the_checkpoint_does_not_have_is_removed() -> None:
    model, optimizer = make("Adam", 0)
    step(model, optimizer, 0)
    del optimizer.state[model[2].bias]
    for state in optimizer.state.values():
        del state["max_exp_avg_sq"]
    image, _ = make_image({"model": model, "optimizer": optimizer, "rng": None})
    other_model, other = make("Adam", 1)
    step(other_model, other, 1)
    restore({"model": other_model, "optimizer": other, "rng": None}, image)
    assert other_model[2].bias not in other.state
    assert "max_exp_avg_sq" not in other.state[other_model[0].weight]
    fresh_model, fresh = make("Adam", 0)
    image, _ = make_image({"model": fresh_model, "optimizer": fresh, "rng": None})
    restore({"model": other_model, "optimizer": other, "rng": None}, image)
    assert not other.state


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


def test_an_optimizer_whose_ranks_keep_parts_without_names_is_refused_with_what_to_use() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("call consolidate_state_dict")

    optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters())
    with pytest.raises(CaptureError, match=r'state\["optimizer"\] is a Zero.*fully_shard'):
        walk_state({"optimizer": optimizer})
