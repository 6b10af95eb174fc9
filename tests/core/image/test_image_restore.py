"""Restoring into a state: where each value goes, subsets, and mismatches."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from image_help import header_of, make_image, restore
from torch import nn

from tierfall.core.load.load import plan_load
from tierfall.core.types.errors import RestoreError

# ---- plain values


def test_a_mapping_that_cannot_be_written_takes_tensors_but_no_values() -> None:
    image, _ = make_image({"w": torch.ones(2), "n": {"x": 1}, "rng": None})
    state = {"w": torch.zeros(2), "n": {"x": 0}, "rng": None}
    restore(MappingProxyType(state), image)
    assert state["w"].tolist() == [1, 1]
    assert state["n"] == {"x": 1}
    image, _ = make_image({"w": torch.ones(2), "n": 5, "rng": None})
    with pytest.raises(RestoreError, match=r"n cannot be restored.*read-only; pass a dict"):
        restore(MappingProxyType({"w": torch.zeros(2), "n": 0, "rng": None}), image)


# ---- what is meant otherwise


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)


def trained(model: nn.Module, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"net": model, "optimizer": optimizer, "rng": None}


@pytest.mark.parametrize(
    ("rename", "output"),
    [
        ({"net.encodr": "net.x"}, "has no entry of that name; nearest: net.encoder"),
        ({"net.encoder": "other.encoder"}, "is not within 'net'"),
        ({"net.encoder": "net.head"}, "would give two entries the name 'net.head.weight'"),
        (["net"], "must be a mapping"),
        ({"net": None}, "must be a mapping {name in the checkpoint: name in the state}"),
        ({"config.lr": "config.rate"}, "'config.lr' is part of a plain value"),
        ({"list.0": "list.1"}, "'list.0' is an element of a sequence"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(rename: Any, output: str) -> None:
    more = {"config": {"lr": 0.5}, "list": [torch.ones(1), torch.ones(1)]}
    image, _ = make_image({**trained(Before()), **more})
    with pytest.raises(RestoreError, match=re.escape(output)):
        restore({**trained(Before()), **more}, image, rename=rename, strict=False)


def test_what_is_skipped_of_groups_in_another_order_goes_by_the_states_order() -> None:
    def made(first: str, rates: list[float]) -> dict[str, Any]:
        net = nn.Linear(2, 2)
        names = [first, "bias" if first == "weight" else "weight"]
        groups = [
            {"params": [getattr(net, n)], "lr": lr} for n, lr in zip(names, rates, strict=True)
        ]
        return {"net": net, "optimizer": torch.optim.AdamW(groups), "rng": None}

    image, _ = make_image(made("weight", [0.1, 0.2]))
    state = made("bias", [0.8, 0.7])
    restore(state, image, skip=["optimizer.param_groups.0.lr"])
    assert [group["lr"] for group in state["optimizer"].param_groups] == [0.8, 0.1]


def test_schedulers_in_a_scheduler_of_other_classes_are_refused() -> None:
    def made(last: Any, *more: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        lr = torch.optim.lr_scheduler
        inner = [
            lr.LinearLR(optimizer, total_iters=3),
            *[make(optimizer) for make in (last, *more)],
        ]
        milestones = [3, 8][: len(inner) - 1]
        return {"schedule": lr.SequentialLR(optimizer, inner, milestones), "rng": None}

    def steps(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def cosine(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    image, _ = make_image(made(steps))
    restore(made(steps), image)
    for other in (made(cosine), made(steps, cosine)):
        with pytest.raises(
            RestoreError, match=r"has the state of a SequentialLR\(LinearLR, StepLR\)"
        ):
            restore(other, image)


def test_a_module_that_has_not_run_is_refused_with_what_to_do() -> None:
    ready = nn.LazyLinear(4)
    ready(torch.ones(1, 3))
    image, _ = make_image({"m": ready, "rng": None})
    with pytest.raises(RestoreError, match=r"m.weight: .*uninitialized.*run the module once"):
        restore({"m": nn.LazyLinear(4), "rng": None}, image)


def test_gradients_of_what_is_restored_are_let_go_of() -> None:
    state = trained(Before())
    image, _ = make_image(state)
    loose = nn.Parameter(torch.ones(3))
    loose.grad = torch.ones(3)
    restore(state, image)
    assert [p.grad for p in state["net"].parameters()] == [None] * 4
    for parameter in state["net"].parameters():
        parameter.grad = torch.ones_like(parameter)
    restore(state, image, only=["net.head"])
    kept = {name for name, p in state["net"].named_parameters() if p.grad is not None}
    assert kept == {"encoder.weight", "encoder.bias"}
    assert loose.grad is not None


# ---- strict, and parts


def test_a_value_does_not_take_the_place_of_tensors() -> None:
    image, _ = make_image({"d": {"n": 1, "m": 2}, "rng": None})
    state = {"d": {"n": 0, "m": torch.zeros(1)}, "rng": None}
    for strict in (True, False):
        with pytest.raises(RestoreError, match=r"d\.m: the checkpoint has a plain value"):
            restore(state, image, strict=strict)
    restore(state, image, skip=["d.m"])
    assert state["d"]["n"] == 1
    assert torch.is_tensor(state["d"]["m"])


# ---- objects with state_dict and load_state_dict


class Loader:
    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.buffer = torch.arange(position)
        self.loaded: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer, "deep": [{"t": (self.buffer,)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["buffer"] is state["deep"][0]["t"][0]
        self.position, self.buffer = state["position"], state["buffer"]


def test_load_goes_to_the_device_that_is_asked_for() -> None:
    image, _ = make_image({"w": torch.ones(2), "b": b"x" * 70_000, "n": np.arange(2), "rng": None})
    plan = plan_load(header_of(image), map_location="meta")
    devices = {each.target.device.type for each in plan.targets}
    assert devices == {"meta", "cpu"}


def test_what_a_module_makes_of_itself_may_have_grown() -> None:
    class Scaled(nn.Linear):
        extra = torch.empty(0, dtype=torch.uint8)

        def get_extra_state(self) -> torch.Tensor:
            return self.extra

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.extra = state

    saved, live = Scaled(2, 2), Scaled(2, 2)
    saved.extra = torch.arange(33, dtype=torch.uint8)
    image, _ = make_image({"net": saved})
    restore({"net": live}, image)
    assert torch.equal(live.extra, saved.extra)


@pytest.mark.parametrize("where", [lambda d: {"epoch": 1, "sched": d}, lambda d: [d]])
def test_a_state_dict_inside_a_plain_value_is_refused_without_harmful_advice(where: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"extra": where(schedule.state_dict())}
    image, _ = make_image(state)
    with pytest.raises(RestoreError, match="put the object itself into the state") as caught:
        restore(state, image)
    assert "skip" not in str(caught.value)


def test_a_state_dict_in_place_of_its_module_is_refused_with_the_cure() -> None:
    model = nn.Linear(2, 2)
    image, _ = make_image({"model": model})
    with pytest.raises(RestoreError, match=r"model: .*\(put the module itself into the state\)"):
        restore({"model": model.state_dict()}, image)


def test_an_object_in_a_container_that_was_plain_is_not_left_as_it_was() -> None:
    image, _ = make_image({"extra": {"scaler": {"scale": 2.0}, "log": [], "epoch": 1}})
    state = {"extra": {"scaler": Loader(), "log": [torch.ones(1)], "epoch": 0}}
    with pytest.raises(
        RestoreError, match=r"extra\.scaler: the checkpoint has a plain value"
    ) as caught:
        restore(state, image, strict=False)
    assert "extra.log" not in str(caught.value)
    with pytest.raises(RestoreError, match=r"extra\.log: in the state, not in the checkpoint"):
        restore(state, image, skip=["extra.scaler"])
    restore(state, image, skip=["extra.scaler"], strict=False)
    assert state["extra"]["epoch"] == 1


def test_a_scaler_that_was_off_does_not_go_into_one_that_is_on() -> None:
    image, _ = make_image({"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    live = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(RestoreError, match=r"was disabled; skip=\['scaler'\]"):
        restore({"scaler": live}, image)
    restore({"scaler": live}, image, skip=["scaler"])
    restore({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, image)


@pytest.mark.parametrize(
    ("saved", "there"),
    [
        (torch.ones(1), 0.5),
        (0.5, torch.ones(1)),
        ({"x": torch.ones(1)}, [torch.ones(1)]),
        ([torch.ones(1)], (torch.ones(1),)),
        (nn.Linear(1, 1), torch.ones(1)),
        (1, nn.Linear(1, 1)),
        ({"x": torch.ones(1)}, nn.Linear(1, 1)),
    ],
)
def test_kinds_that_differ_are_refused_even_where_lenient(saved: object, there: object) -> None:
    image, _ = make_image({"e": saved, "rng": None})
    with pytest.raises(RestoreError, match=r"e: the checkpoint has .*, the state has "):
        restore({"e": there, "rng": None}, image, strict=False)
