"""A save between a backward pass and the step that uses its gradients is reported once; other loops get no report."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import tierfall
from tests.core.capture.lazy_help import MakeConfig

Save = Callable[[], None]


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.other = nn.Linear(6, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.others = torch.optim.Adam(self.other.parameters())
        self.state = {
            "model": self.model,
            "other": self.other,
            "optimizer": self.optimizer,
            "others": self.others,
        }

    def out(self) -> torch.Tensor:
        return self.model(torch.randn(4, 6))  # type: ignore[no-any-return]

    def backward(self) -> None:
        self.out().pow(2).mean().backward()


def step_save_zero(t: Training, save: Save, **zero: bool) -> None:
    t.backward()
    t.optimizer.step()
    save()
    t.optimizer.zero_grad(**zero)


def left_out_by_the_loop(t: Training, save: Save, **zero: bool) -> None:
    """As a loop does that leaves a batch out whose gradients are too large, or a GradScaler's step."""
    for skipped in (False, True):
        t.optimizer.zero_grad(**zero)
        t.backward()
        if not skipped:
            t.optimizer.step()
        save()


def stepped_in_backward(t: Training, save: Save, **zero: bool) -> None:
    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(**zero)

    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in t.model.parameters()}
    hooks = [p.register_post_accumulate_grad_hook(step) for p in t.model.parameters()]
    for _ in range(3):
        t.backward()
        save()
    for hook in hooks:
        hook.remove()


@pytest.fixture
def saved_steps(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> Iterator[tuple[Training, Save, Callable[[], list[str]]]]:
    training, steps = Training(), iter(range(1, 100))
    with tierfall.open(make_config()) as ckpt:
        yield (
            training,
            lambda: ckpt.save(next(steps), training.state).wait(timeout=20),
            lambda: [m for m in caplog.messages if "uses its gradients" in m],
        )


@pytest.mark.parametrize(
    ("loop", "set_to_none"),
    [
        (step_save_zero, False),
        (left_out_by_the_loop, False),
        (stepped_in_backward, True),
    ],
)
def test_a_loop_that_leaves_out_no_gradients_receives_nothing(
    loop: Callable[..., None],
    saved_steps: tuple[Training, Save, Callable[[], list[str]]],
    set_to_none: bool,
) -> None:
    training, save, output = saved_steps
    for _ in range(3):
        loop(training, save, set_to_none=set_to_none)
    assert output() == []


def test_a_scaler_that_skips_steps_is_no_accumulation(
    saved_steps: tuple[Training, Save, Callable[[], list[str]]],
) -> None:
    training, save, output = saved_steps
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (False, True, False, True, True, False):
        training.optimizer.zero_grad()
        scaler.scale(training.out().pow(2).mean()).backward()
        if overflow:
            training.model[0].weight.grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(training.optimizer)
        scaler.update()
        save()
    assert output() == []


@pytest.mark.parametrize("one_buffer", [False, True])
def test_large_gradients_are_let_go_of_where_the_loop_does(
    make_config: MakeConfig, one_buffer: bool
) -> None:
    """Also small ones that are views of one large buffer, as data-parallel training makes them."""
    model = nn.Linear(4, 4) if one_buffer else nn.Linear(600, 600, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierfall.open(make_config()) as ckpt:
        buffer = torch.ones(2 << 20)
        for parameter in model.parameters():
            part = buffer[: parameter.numel()].view_as(parameter)
            parameter.grad = part if one_buffer else part.clone()
            del part
        alive = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        optimizer.zero_grad()
        assert [gradient() for gradient in alive] == [None] * len(alive)
