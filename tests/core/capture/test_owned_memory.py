"""Plain tensors in the memory of an optimizer, as in state dicts: captured lazily, with the values of the save."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import tierfall
from tests.core.capture.lazy_help import Held, MakeConfig, Trainer, warmed_up

pytestmark = pytest.mark.usefixtures("small_segments")

Tensors = dict[str, torch.Tensor]


def own_dicts(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def dicts_by_name(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}


def views(trainer: Trainer) -> dict[str, Any]:
    weight = trainer.model[0].weight.detach()
    return {"flat": weight.view(-1), "rows": [weight[3:50], weight[50:]], "array": weight.numpy()}


def partitions(trainer: Trainer) -> dict[str, Any]:
    """As ZeRO has them: the state of a flat parameter, which no module has."""
    flat = nn.Parameter(torch.randn(20_000))
    trainer.optimizer = torch.optim.AdamW(
        [flat], lr=0.1, foreach=trainer.optimizer.defaults["foreach"]
    )
    trainer.backward = lambda: flat.pow(2).sum().backward()  # type: ignore[method-assign]
    trainer.step()
    return {"flat": flat.detach(), **trainer.optimizer.state[flat]}


def partitions_lent_for_a_step(trainer: Trainer) -> dict[str, Any]:
    """As ZeRO-3 has them: between two steps no group has the parameter."""
    state = partitions(trainer)
    (group,) = trainer.optimizer.param_groups
    flat = group["params"]
    step = trainer.optimizer.step

    def step_once() -> None:
        group["params"] = flat
        step()
        group["params"] = []

    trainer.optimizer.step = step_once  # type: ignore[assignment, method-assign]
    group["params"] = []
    return state


def flat_tensors(value: Any, name: str = "") -> Tensors:
    """The tensors of a nested state, NumPy arrays among them."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    if hasattr(value, "__array_interface__"):
        return {name: torch.from_numpy(value)}
    entries = value.items() if isinstance(value, dict) else ()
    entries = enumerate(value) if isinstance(value, list) else entries
    return {n: t for key, each in entries for n, t in flat_tensors(each, f"{name}.{key}").items()}


def copied(value: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in flat_tensors(value).items()}


def byte_count(tensors: Tensors) -> int:
    return sum(each.numel() * each.element_size() for each in tensors.values())


def is_copied(ckpt: tierfall.Checkpointer) -> bool:
    snapshot = ckpt._capturer._current
    return snapshot is None or snapshot.copier.copied


def assert_saved(folder: Path, expected: Tensors) -> None:
    found = flat_tensors(tierfall.load(folder, step=2))
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (own_dicts, {"foreach": True}),
        (dicts_by_name, {"foreach": False}),
        (views, {"foreach": True}),
        (partitions, {"fused": True}),
        (partitions_lent_for_a_step, {"foreach": False}),
    ],
)
def test_a_state_dict_is_captured_lazily_with_the_values_of_the_save(
    make_config: MakeConfig,
    tmp_path: Path,
    held: Held,
    make: Callable[[Trainer], dict[str, Any]],
    options: dict[str, Any],
) -> None:
    trainer = Trainer(**options)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        state = make(trainer)
        before = copied(state)
        held.hold()
        handle = ckpt.save(2, state)
        assert not is_copied(ckpt)
        assert handle.stats.lazy
        assert handle.stats.lazy_bytes >= byte_count(before)
        trainer.step()  # copies what is left before it changes anything
        assert is_copied(ckpt)
        assert not torch.equal(
            next(iter(flat_tensors(state).values())), next(iter(before.values()))
        )
        held.free.set()
        handle.wait("disk")
        assert ckpt.statistics().lazy_bytes == handle.stats.lazy_bytes
    assert_saved(tmp_path / "disk", before)


def replaced_moments(trainer: Trainer) -> Tensors:
    """Of an optimizer that has loaded others since."""
    old = {
        f"{number}.{name}": tensor
        for number, moments in trainer.optimizer.state_dict()["state"].items()
        for name, tensor in moments.items()
    }
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    return old


def replaced_weights(trainer: Trainer) -> Tensors:
    old = dict(trainer.model.state_dict())
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()
    return old


def frozen_weights(trainer: Trainer) -> Tensors:
    trainer.model.requires_grad_(False)
    return dict(trainer.model.state_dict())


def of_an_optimizer_that_never_stepped(trainer: Trainer) -> Tensors:
    other = nn.Linear(100, 100)
    trainer.other = torch.optim.SGD(other.parameters(), lr=0.1)  # type: ignore[attr-defined]
    return dict(other.state_dict())


def between_the_columns_of_a_parameter(trainer: Trainer) -> Tensors:
    """Memory from the parameter's first byte on, and no more bytes than it has, of which half are not its own."""
    memory = torch.randn(100, 100)
    columns = nn.Parameter(memory[:, :50])
    trainer.optimizer.add_param_group({"params": [columns]})
    columns.grad = torch.zeros_like(columns)
    trainer.optimizer.step()
    return {"first half": memory.view(-1)[:5000]}


def more_than_a_parameter(trainer: Trainer) -> Tensors:
    """A flat buffer that begins with a parameter, and ends with what anybody may write to."""
    memory = torch.randn(100, 100)
    rows = nn.Parameter(memory[:50])
    trainer.optimizer.add_param_group({"params": [rows]})
    rows.grad = torch.zeros_like(rows)
    trainer.optimizer.step()
    return {"buffer": memory}


@pytest.mark.parametrize(
    "make",
    [
        replaced_moments,
        replaced_weights,
        frozen_weights,
        of_an_optimizer_that_never_stepped,
        between_the_columns_of_a_parameter,
        more_than_a_parameter,
    ],
)
def test_what_no_optimizer_owns_is_copied_before_save_returns(
    make_config: MakeConfig,
    tmp_path: Path,
    held: Held,
    make: Callable[[Trainer], Tensors],
) -> None:
    trainer, stepping = Trainer(), Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stepping.step()
        state = make(trainer)
        before = {f".plain.{name}": tensor.clone() for name, tensor in state.items()}
        held.hold()
        lazily = {"model": stepping.model, "optimizer": stepping.optimizer}
        handle = ckpt.save(2, {"plain": state, "trained": lazily})
        assert handle.stats.lazy_bytes <= byte_count(stepping.now())
        for tensor in state.values():
            tensor.zero_()
        held.free.set()
        handle.wait("disk")
    assert_saved(tmp_path / "disk", before)
