"""Optimizer state with the strides of its parameters: fused steps read both in memory order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_help import bits, deliver, header_of, make_image
from torch import nn

from tierfall.core.image.header import ImageHeader
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill

Optimizers = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: Optimizers.AdamW(p, lr=0.1, fused=True),
    "fused SGD": lambda p: Optimizers.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda p: Optimizers.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


class Laid(nn.Module):
    """Parameters that lie in memory in every way that torch knows; with ``plain`` each in order."""

    def __init__(self, seed: int, *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = {
            "images": torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last),
            "grouped": torch.randn(6, 1, 3, 3).to(memory_format=torch.channels_last),
            "volumes": torch.randn(2, 3, 2, 3, 4).to(memory_format=torch.channels_last_3d),
            "transposed": torch.randn(24, 16).t(),
            "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
            "flat": torch.randn(1, 1, 5).transpose(1, 2),
            "later": torch.randn(101)[1:],
            "number": torch.tensor(2.0),
            "nothing": torch.empty(0, 3).t(),
            "plain": torch.randn(7, 5),
        }
        for name, tensor in made.items():
            values = tensor.contiguous() if plain else tensor
            self.register_parameter(name, nn.Parameter(values))


class Run:
    def __init__(self, kind: str, seed: int = 0, *, plain: bool = False) -> None:
        self.model = Laid(seed, plain=plain)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "rng": None}

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, list[int]]:
        found = {name: bits(tensor) for name, tensor in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = bits(value)
        return found

    def strides(self) -> dict[str, list[int]]:
        """Those of all dimensions that have any."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                lengths = zip(value.stride(), value.shape, strict=True)
                found[f"{name} {key}"] = [stride for stride, length in lengths if length > 1]
        return found


def trained(kind: str, **options: Any) -> Run:
    run = Run(kind, **options)
    for number in range(3):
        run.step(number)
    return run


def restored(run: Run, image: bytes, header: ImageHeader) -> Run:
    plan = plan_fill(run.state, header, Choices())
    deliver(plan.targets, image, header)
    plan.finish()
    return run


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("kind", ["fused AdamW", "fused SGD"])
def test_moments_follow_parameters_that_lie_otherwise_now(kind: str, plain: bool) -> None:
    """A run may be switched to channels_last, and back."""
    run = trained(kind, plain=not plain)
    image, _ = make_image(run.state)
    header = header_of(image)
    other = restored(Run(kind, 1, plain=plain), image, header)
    assert other.bits() == run.bits()
    for number in range(3, 6):
        run.step(number)
        other.step(number)
    assert other.bits() == run.bits()


def test_state_that_lay_otherwise_than_its_parameter_lies_so_again() -> None:
    """As an optimizer of a user's own may keep it."""
    run = trained("SGD")
    weight = run.model.transposed
    run.optimizer.state[weight]["momentum_buffer"] = torch.randn(16, 24)
    run.optimizer.state[weight]["turned"] = torch.randn(3, 5).t()
    image, _ = make_image(run.state)
    other = restored(Run("SGD", 1), image, header_of(image))
    found = other.optimizer.state[other.model.transposed]
    assert found["momentum_buffer"].stride() == (24, 1)
    assert found["turned"].stride() == (1, 5)
    assert other.bits() == run.bits()
