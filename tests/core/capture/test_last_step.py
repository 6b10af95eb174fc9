"""The last step given to ``maybe_save``, which close saves: as it was then, or not at all with a report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.core.capture.lazy_help import MakeConfig, Trainer, assert_same, saved
from tierfall.core.sampling.fingerprint import TENSORS_MIN
from tierfall.core.types.errors import RestoreError

LAST = 3


def at_end(make_config: MakeConfig) -> dict[str, Any]:
    return {**make_config(), "interval": {"every": 100, "at_end": True}}


def train_and(
    config: dict[str, Any], trainer: Trainer, after: Callable[[Trainer], object]
) -> dict[str, torch.Tensor]:
    """Train to the last step, do something to the state, and leave the run; return what the last step was."""
    with tierfall.open(config) as ckpt:
        for step in range(1, LAST + 1):
            trainer.step()
            ckpt.maybe_save(step, trainer.state)
        before = trainer.now()
        after(trainer)
    return before


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def load_best_optimizer(trainer: Trainer) -> object:
    """The tensors of the last step stay alive in the dict that was kept."""
    last = trainer.optimizer.state_dict()
    best = copy.deepcopy(last)
    for entries in best["state"].values():
        entries["exp_avg"].zero_()
    trainer.optimizer.load_state_dict(best)
    return last


def assign_best(trainer: Trainer) -> object:
    kept = list(trainer.model.parameters())
    trainer.model.load_state_dict(zeros_like(trainer.model.state_dict()), assign=True)
    return kept


def swap_average_in(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))


def to_half_by_swapping(trainer: Trainer) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        trainer.model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: dict[str, tuple[Callable[[Trainer], object], str]] = {
    "half, by swapping": (to_half_by_swapping, "model"),
    "best weights, assigned": (assign_best, "model"),
    "average by .data": (swap_average_in, "model"),
    "best optimizer": (load_best_optimizer, "optimizer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_was_changed_after_the_loop_is_not_saved_as_its_last_step(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """What was there before may still be alive somewhere: it is not the state's any more."""
    kept = []
    after, named = CHANGES[change]
    train_and(at_end(make_config), Trainer(), lambda t: kept.append(after(t)))
    with pytest.raises(RestoreError):
        tierfall.load(tmp_path / "disk")
    (output,) = [r.getMessage() for r in caplog.records if "the last step" in r.getMessage()]
    assert f"close: the last step is not saved: step {LAST}: " in output
    assert named in output
    assert "was changed since" in output


def evaluate(trainer: Trainer) -> None:
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(torch.randn(4, 40))


class Small(Trainer):
    """Tensors shorter than a cache line."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}


class Normalized(Trainer):
    """Its forward moves running statistics on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize(
    ("make", "after", "named"),
    [
        (Small, lambda t: t.model[1].bias.data.zero_(), "bias"),
        (Normalized, lambda t: t.model(torch.randn(4, 40)), "num_batches_tracked"),
        (Normalized, evaluate, None),
    ],
    ids=["three elements", "statistics moved", "statistics read"],
)
def test_what_few_bytes_hold_and_what_forward_moves_is_seen(
    make_config: MakeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Trainer],
    after: Callable[[Trainer], object],
    named: str | None,
) -> None:
    before = train_and(at_end(make_config), make(), after)
    if named is None:
        assert_same(saved(tmp_path / "disk", LAST), before)
    else:
        assert f'state["model"]["1.{named}"] was changed since' in caplog.text
        with pytest.raises(RestoreError):
            tierfall.load(tmp_path / "disk")


class Deep(Trainer):
    """As many weights as a fingerprint takes, and as many biases."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(TENSORS_MIN)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model}

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


def clear_biases(trainer: Trainer) -> None:
    with torch.no_grad():
        for layer in trainer.model:
            layer.bias.zero_()


def clear_moments(trainer: Trainer) -> None:
    for entries in trainer.optimizer.state.values():
        entries["exp_avg"].zero_()


def fill_all_but_a_row(trainer: Trainer) -> None:
    trainer.model[0].weight.detach().numpy()[1:] = 7


@pytest.mark.parametrize(
    ("make", "after"),
    [(Deep, clear_biases), (Trainer, clear_moments), (Trainer, fill_all_but_a_row)],
    ids=["each second tensor", "moments made after the first call", "behind the first row"],
)
def test_a_change_of_some_of_the_state_is_seen_wherever_it_is(
    make_config: MakeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Trainer],
    after: Callable[[Trainer], None],
) -> None:
    trainer = make()
    with tierfall.open(at_end(make_config)) as ckpt:
        ckpt.maybe_save(0, trainer.state)  # before the optimizer has any state
        for step in range(1, LAST + 1):
            trainer.step()
            ckpt.maybe_save(step, trainer.state)
        after(trainer)
    assert "was changed since" in caplog.text
    with pytest.raises(RestoreError):
        tierfall.load(tmp_path / "disk")


def test_memory_that_was_freed_in_place_is_not_read(make_config: MakeConfig) -> None:
    """The address of a view behind the beginning of a freed storage is not 0."""
    flat = torch.randn(100_000)
    module = nn.Module()
    module.first, module.second = nn.Parameter(flat[:50_000]), nn.Parameter(flat[50_000:])
    with tierfall.open(at_end(make_config)) as ckpt:
        ckpt.maybe_save(1, {"model": module})
        flat.untyped_storage().resize_(0)
        ckpt.maybe_save(2, {"model": module})
        flat.untyped_storage().resize_(flat.nbytes)
        flat.fill_(1)
        ckpt.maybe_save(3, {"model": module})


def test_parameters_can_be_swapped_while_the_run_is_open(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """torch refuses to where a weak reference to one is alive anywhere."""
    trainer = Trainer()
    with tierfall.open(at_end(make_config)) as ckpt:
        for step in range(1, LAST + 1):
            trainer.step()
            fresh = nn.Parameter(torch.randn(100, 40))
            torch.utils.swap_tensors(trainer.model[0].weight, fresh)  # type: ignore[arg-type]
            ckpt.maybe_save(step, trainer.state)
        before = trainer.now()
    assert_same(saved(tmp_path / "disk", LAST), before)
