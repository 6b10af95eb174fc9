"""Modules: named without wrappers, restored into the tensors that are there, extra state through the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_help import header_of, load, make_image, restore
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from tierfall.core.load.fill import plan_fill
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import RestoreError


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def compiled_(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


# ---- wrappers


class Layer(nn.Module):
    """A layer as large models have them, of which parts may be wrapped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = Extra({"amax": 1.0})
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.extra(self.inner(x))
        return found


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "bare": lambda: Layer(nn.Linear(1, 1)),
    "checkpointed": lambda: checkpoint_wrapper(Layer(nn.Linear(1, 1))),
    "checkpointed twice": lambda: checkpoint_wrapper(checkpoint_wrapper(Layer(nn.Linear(1, 1)))),
    "inner": lambda: Layer(checkpoint_wrapper(nn.Linear(1, 1))),
    "compiled": lambda: compiled_(checkpoint_wrapper(Layer(nn.Linear(1, 1)))),
    "around compiled": lambda: checkpoint_wrapper(compiled_(Layer(nn.Linear(1, 1)))),
    "inner compiled": lambda: checkpoint_wrapper(Layer(compiled_(nn.Linear(1, 1)))),
    "offloaded": lambda: offload_wrapper(Layer(nn.Linear(1, 1))),
}
"""How activation checkpointing may be switched on, with and without compiling."""


def in_training(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(WRAPPED[kind](), nn.Linear(1, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("before", "after"),
    [*((kind, "bare") for kind in WRAPPED), *(("bare", kind) for kind in WRAPPED)][1:],
)
def test_activation_checkpointing_may_be_switched_on_and_off_between_runs(
    before: str, after: str
) -> None:
    """The optimizer meets the parameters by their names, and trains on as if nothing had been."""
    model, optimizer = in_training(before, 0)
    step(model, optimizer)
    note = {"amax": 7.0}
    next(m for m in model.modules() if isinstance(m, Extra)).note = note
    image, _ = make_image({"model": model, "optimizer": optimizer, "rng": None})
    assert not any("_checkpoint_wrapped" in t.name for t in header_of(image).tensors)
    assert not any("_orig_mod" in t.name for t in header_of(image).tensors)
    other, target = in_training(after, 1)
    restore({"model": other, "optimizer": target, "rng": None}, image)
    assert next(m for m in other.modules() if isinstance(m, Extra)).note == note
    for one, two in ((model, optimizer), (other, target)):
        step(one, two)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


# ---- what state_dict may do


class Extra(nn.Linear):
    def __init__(self, note: object) -> None:
        super().__init__(1, 1)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


@pytest.mark.parametrize(
    "note",
    [{"scale": [1.5, None]}, torch.arange(3), {"t": torch.ones(2), "n": 1}, None, "x" * 70_000],
)
def test_extra_state_comes_back_through_the_module(note: object) -> None:
    source = nn.Sequential(compiled_(nn.Sequential(Extra(note))))
    image, _ = make_image({"m": source, "rng": None})
    target = nn.Sequential(nn.Sequential(Extra("before")))
    restore({"m": target, "rng": None}, image)
    back = target[0][0].note
    if isinstance(note, torch.Tensor):
        assert torch.equal(back, note)
    elif isinstance(note, dict) and "t" in note:
        assert torch.equal(back["t"], note["t"])
    else:
        assert back == note
    assert "0._orig_mod.0._extra_state" in load(image)["m"]


class Fused(nn.Module):
    """One parameter that its state_dict has as three, cut from it or copied."""

    def __init__(self, *, copies: bool, joins: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6, 2))
        self.o = nn.Linear(2, 2)
        self.copies = copies
        self.register_state_dict_post_hook(self.split)
        if joins:
            self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, more: object) -> None:
        whole = state.pop(prefix + "qkv")
        whole = whole.clone() if module.copies else whole
        for name, part in zip("qkv", whole.chunk(3), strict=True):
            state[prefix + name] = part

    @staticmethod
    def join(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *more: object) -> None:
        state[prefix + "qkv"] = torch.cat([state.pop(prefix + name) for name in "qkv"])


def test_a_parameter_whose_keys_nobody_joins_again_is_an_error() -> None:
    image, _ = make_image({"m": Fused(copies=True), "rng": None})
    with pytest.raises(RestoreError, match=r"load_state_dict of m failed"):
        restore({"m": Fused(copies=True, joins=False), "rng": None}, image)


class Scaled(nn.Module):
    """Its state_dict has its parameter twice as large."""

    def __init__(self, *, undone: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(self.scale)
        if undone:
            self.register_load_state_dict_pre_hook(self.unscale)

    @staticmethod
    def scale(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, more: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    @staticmethod
    def unscale(
        module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *more: object
    ) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2


def test_a_scaled_copy_comes_back_where_the_module_undoes_it_and_is_an_error_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = Scaled(undone=True), Scaled(undone=True)
    image, _ = make_image({"m": source, "rng": None})
    restore({"m": target, "rng": None}, image)
    assert torch.equal(target.weight, source.weight)
    image, _ = make_image({"m": Scaled(undone=False), "rng": None})
    output = r"its state_dict\(\) differs from what was loaded: 'weight'"
    with pytest.raises(RestoreError, match=output):
        restore({"m": Scaled(undone=False), "rng": None}, image)
    restore({"m": Scaled(undone=False), "rng": None}, image, strict=False)
    assert "differs from what was loaded: 'weight'" in caplog.text


class Unsteady(nn.Module):
    """Its state_dict has other keys from call to call: every other time, or each time."""

    def __init__(self, *, period: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.calls = 0
        self.period = period
        self.register_state_dict_post_hook(self.count)

    @staticmethod
    def count(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, more: object) -> None:
        module.calls += 1
        if number := module.calls % module.period:
            state[f"{prefix}call{number}"] = torch.full((2,), float(module.calls))


@pytest.mark.parametrize("period", [2, 1000])
def test_a_module_whose_keys_change_from_call_to_call_is_saved_each_time_and_not_restored(
    period: int,
) -> None:
    source = nn.Sequential(nn.Linear(2, 2), Unsteady(period=period))
    recall = WalkCache()
    for calls in range(1, 5):
        with torch.no_grad():
            source[1].weight.add_(1)
        view = walk_state({"m": source, "rng": None}, recall)
        found = dict(zip(view.names, view.sources, strict=True))
        wanted = {"m.0.weight", "m.0.bias", "m.1.weight"}
        wanted |= {f"m.1.call{calls % period}"} if calls % period else set()
        assert found.keys() == wanted
        assert torch.equal(found["m.1.weight"], source[1].weight)
    image, _ = make_image({"m": source, "rng": None})
    with pytest.raises(RestoreError, match=r"returned different keys|in the checkpoint, not"):
        restore({"m": nn.Sequential(nn.Linear(2, 2), Unsteady(period=period)), "rng": None}, image)


# ---- what does not fit


def test_meta_module_is_refused() -> None:
    image, _ = make_image({"m": nn.Linear(1, 1), "rng": None})
    with torch.device("meta"), pytest.raises(RestoreError, match="meta"):
        plan_fill({"m": nn.Linear(1, 1), "rng": None}, header_of(image))


class Cached(nn.Linear):
    """Keeps what it computes from its weight, made anew whenever that is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sum = self.weight.detach().sum()


class ByPostHook(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.renew())

    def renew(self) -> None:
        self.sum = self.weight.detach().sum()


class ByOwnLoad(Cached):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.sum = self.weight.detach().sum()


class ByOwnLoadOfAll(Cached):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_state_dict(*arguments, **options)
        self.sum = self.weight.detach().sum()
        return found


@pytest.mark.parametrize("kind", [ByPostHook, ByOwnLoad, ByOwnLoadOfAll])
def test_what_a_module_does_when_it_is_loaded_is_done(kind: type[Cached]) -> None:
    saved = kind()
    image, _ = make_image({"model": saved, "rng": None})
    restore({"model": (live := kind()), "rng": None}, image)
    assert torch.equal(live.weight, saved.weight)
    assert live.sum == saved.weight.sum()
