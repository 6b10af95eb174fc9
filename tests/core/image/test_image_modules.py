"""Modules: named without wrappers, restored into the tensors that are there, extra state through the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_help import header_of, make_image, restore
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from tierfall.core.types.errors import RestoreError


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


# ---- what does not fit


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
