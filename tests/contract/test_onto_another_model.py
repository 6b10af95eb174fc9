"""A restore onto a state that has changed since: only, skip, rename, retype, resize, strict, and errors that name the
place and the argument that helps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.contract.kit import Place, equal
from tierfall.errors import RestoreError

SKIP_HEAD = ["model.head", "optimizer.state.model.head"]


class Net(nn.Module):
    """An embedding of ``words``, a body, and a head of ``classes``."""

    def __init__(self, words: int = 10, classes: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, words if tied else classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(numbers)))
        return found


def make(
    *args: Any, steps: int = 0, seed: int = 0, kind: Any = None, **words: Any
) -> dict[str, Any]:
    """A model and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = Net(*args, **words)
    state = {"model": model, "optimizer": (kind or torch.optim.AdamW)(model.parameters())}
    for _ in range(steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> None:
    state["model"](torch.arange(5)).pow(2).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def run(module_place: Place) -> Place:
    """Step 1 of a net of 10 words and 3 classes after two steps."""
    module_place.config()
    with module_place.open() as ckpt:
        ckpt.save(1, {**make(steps=2), "extra": {"epoch": 3}}, block=True)
    return module_place


@pytest.fixture
def ckpt(run: Place) -> Iterator[tierfall.Checkpointer]:
    with run.open() as opened:
        yield opened


@pytest.fixture
def saved() -> dict[str, Any]:
    return make(steps=2)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(RestoreError) as raised:
        call()
    return str(raised.value)


# Another size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [7, 14])
def test_with_resize_what_both_shapes_have_is_restored_and_the_rest_stays(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any], words: int
) -> None:
    live = make(words, 5, steps=1, seed=1)
    before = weights(live["model"])
    parts = ["model", "optimizer"]
    ckpt.restore(live, only=parts, resize=["model.embed"], skip=SKIP_HEAD)
    both, weight = min(words, 10), live["model"].embed.weight
    assert equal(weight[:both].detach(), saved["model"].embed.weight[:both].detach())
    assert equal(weight[both:].detach(), before["embed.weight"][both:])
    assert equal(live["model"].head.weight.detach(), before["head.weight"])
    moments = live["optimizer"].state[weight]
    then = saved["optimizer"].state[saved["model"].embed.weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert equal(moments[name][:both], then[name][:both])
        assert not moments[name][both:].any(), "0 where nothing was saved"
    assert moments["step"] == 2
    train(live)


def test_without_resize_another_shape_is_refused_and_the_error_names_resize(
    ckpt: tierfall.Checkpointer,
) -> None:
    live = make(14)
    before = weights(live["model"])
    text = refused(lambda: ckpt.restore({**live, "extra": {}}))
    assert re.search(r"model\.embed\.weight: .*\(10, 6\).*\(14, 6\)", text)
    assert "resize=['model.embed.weight']" in text
    assert "rename=" not in text
    text = refused(lambda: ckpt.restore(live, only=["model", "optimizer"], skip=["model.embed"]))
    assert "optimizer.state.model.embed.weight" in text, "moments beside the wrong thing"
    other = {"model": nn.Sequential(nn.Conv2d(6, 6, 1))}
    text = refused(lambda: ckpt.restore(other, only=["model"], rename={"model.body": "model.0"}))
    assert "resize=" not in text, "of as many dimensions only"
    assert equal(weights(live["model"]), before)


def test_resize_follows_strides_and_ties(place: Place) -> None:
    place.config()
    tied, live = make(tied=True, steps=2), make(14, tied=True)
    view = torch.full((4, 3), -1.0).t()
    with place.open() as ckpt:
        ckpt.save(1, {**tied, "w": torch.arange(6.0).view(2, 3)}, block=True)
        ckpt.restore({**live, "w": view}, resize=["model.*", "w"])
    assert live["model"].head.weight is live["model"].embed.weight
    assert equal(live["model"].embed.weight[:10].detach(), tied["model"].embed.weight.detach())
    assert view.tolist() == [[0, 1, 2, -1], [3, 4, 5, -1], [-1] * 4]


def test_factored_moments_are_resized_in_the_dimensions_that_are_the_parameters(
    place: Place,
) -> None:
    place.config()
    saved, live = make(steps=2, kind=torch.optim.Adafactor), make(12, kind=torch.optim.Adafactor)
    with place.open() as ckpt:
        ckpt.save(1, saved, block=True)
        ckpt.restore(live, resize=["model.embed"])
        text = refused(
            lambda: ckpt.restore(make(12, kind=torch.optim.Adafactor), skip=["model.embed"])
        )
        assert "row_var" in text
    then = saved["optimizer"].state[saved["model"].embed.weight]
    now = live["optimizer"].state[live["model"].embed.weight]
    assert equal(now["col_var"], then["col_var"])
    assert equal(now["row_var"][:10], then["row_var"])
    assert now["row_var"].shape[0] == 12
    assert not now["row_var"][10:].any()
    train(live)


# Names -----------------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, net: nn.Module, name: str = "net") -> None:
        super().__init__()
        self.add_module(name, net)


def test_rename_moves_a_model_into_another_one_with_its_moments(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any]
) -> None:
    outer = Outer(Net())
    live: dict[str, Any] = {
        "model": outer,
        "optimizer": torch.optim.AdamW(outer.parameters()),
    }
    parts = ["model", "optimizer"]
    text = refused(lambda: ckpt.restore(live, only=parts))
    assert "rename={'model': 'model.net'}" in text
    ckpt.restore(live, only=parts, rename={"model": "model.net"})
    for one, other in zip(saved["model"].parameters(), outer.parameters(), strict=True):
        assert equal(other.detach(), one.detach())
        assert equal(
            live["optimizer"].state[other]["exp_avg"], saved["optimizer"].state[one]["exp_avg"]
        )
    part = nn.Linear(6, 6)
    names = ["model.weight", "model.bias"]
    ckpt.restore({"model": part}, only=names, rename={"model.body": "model"})
    assert equal(part.weight.detach(), saved["model"].body.weight.detach())


def test_rename_renames_an_entry_and_goes_with_resize(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any]
) -> None:
    net = Net(14)
    ckpt.restore(
        {"policy": net}, only=["policy"], rename={"model": "policy"}, resize=["policy.embed"]
    )
    assert equal(net.embed.weight[:10].detach(), saved["model"].embed.weight.detach())
    policy: Any = Net()
    policy.trunk, policy.body = policy.body, None
    names = {"model": "policy", "model.body": "policy.trunk"}
    ckpt.restore({"policy": policy}, only=["policy"], rename=names)
    assert equal(policy.trunk.weight.detach(), saved["model"].body.weight.detach()), (
        "the longest name"
    )
    with pytest.raises(RestoreError, match="extra"):
        ckpt.restore({"extra": {"age": 0}}, only=["extra"], rename={"extra.epoch": "extra.age"})


def test_an_adapter_that_was_added_later_is_restored_by_the_hints_of_the_error(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any]
) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a = base, nn.Linear(6, 2, bias=False)
            self.b = nn.Linear(2, 6, bias=False)

    model: Any = Net()
    model.body = Adapter(model.body)
    text = refused(lambda: ckpt.restore({"model": model}, only=["model"]))
    hints = dict(re.findall(r"rename=\{'([^']+)': '([^']+)'\}", text))
    assert hints == {
        "model.body.weight": "model.body.base.weight",
        "model.body.bias": "model.body.base.bias",
    }
    skip = ["model.body.a", "model.body.b"]
    ckpt.restore({"model": model}, only=["model"], rename=hints, skip=skip)
    assert equal(model.body.base.weight.detach(), saved["model"].body.weight.detach())


def test_a_misspelt_entry_is_named_with_the_one_that_was_meant(ckpt: tierfall.Checkpointer) -> None:
    live = make()
    text = refused(
        lambda: ckpt.restore({"model": live["model"], "optmizer": live["optimizer"], "extra": {}})
    )
    assert re.search(r"optmizer: in the state, .*optimizer", text)
    assert re.search(r"optimizer: in the checkpoint, not in the state", text)
    assert "param_groups" not in text
    for word in ("only", "skip", "resize"):
        how: dict[str, Any] = {word: ["modle"]}
        assert "modle" in refused(partial(ckpt.restore, {**live, "extra": {}}, **how))


@pytest.mark.parametrize("word", ["only", "skip", "retype", "resize"])
def test_a_word_in_place_of_a_list_is_refused(ckpt: tierfall.Checkpointer, word: str) -> None:
    for wrong in ("model", 5, iter(["model"])):
        how: dict[str, Any] = {word: wrong}
        text = refused(partial(ckpt.restore, make(), **how))
        assert f"{word} must be a list" in text


# What is left out ------------------------------------------------------------------------------------


def test_skip_keeps_values_of_the_state_by_pattern(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any]
) -> None:
    live = make(steps=1, seed=1)
    live["optimizer"].param_groups[0]["lr"] = 0.5
    head = live["model"].head.weight.detach().clone()
    skip = ["optimizer.param_groups.*.lr", "model.head", "extra"]
    ckpt.restore({**live, "extra": {"epoch": 0}}, skip=skip)
    assert live["optimizer"].param_groups[0]["lr"] == 0.5
    assert equal(live["model"].head.weight.detach(), head)
    assert equal(live["model"].body.weight.detach(), saved["model"].body.weight.detach())


def test_skip_refuses_what_shares_memory_with_something_restored(
    ckpt: tierfall.Checkpointer,
) -> None:
    live: dict[str, Any] = {**make(), "extra": {}}
    live["view"] = live["model"].body.weight.view(-1)
    text = refused(lambda: ckpt.restore(live, skip=["view"]))
    assert re.search(r"view: shares its memory with model\.body\.weight", text)
    live["view"] = live["model"].body.weight.detach().clone()
    ckpt.restore(live, skip=["view"])


def test_without_strict_what_only_one_side_has_is_no_error(
    ckpt: tierfall.Checkpointer, saved: dict[str, Any]
) -> None:
    live = make(seed=1)
    live["model"].more = nn.Linear(2, 2)
    del live["model"].head
    state = {"model": live["model"], "new": torch.full((2,), 5.0)}
    text = refused(lambda: ckpt.restore(state, only=["model"]))
    for name in ("model.more.weight", "model.head.weight"):
        assert name in text
    assert "strict" in text or "skip" in text
    ckpt.restore(state, strict=False)
    assert equal(live["model"].body.weight.detach(), saved["model"].body.weight.detach())
    assert state["new"].tolist() == [5, 5]
    other = make(12)
    assert "resize" in refused(lambda: ckpt.restore({"model": other["model"]}, strict=False))


# Another kind ----------------------------------------------------------------------------------------


def test_another_dtype_is_refused_with_a_way_to_convert(ckpt: tierfall.Checkpointer) -> None:
    half = Net().bfloat16()
    text = refused(lambda: ckpt.restore({"model": half}, only=["model"], strict=False))
    assert re.search(r"model\.body\.weight: .*float32 \(6, 6\).*bfloat16 \(6, 6\)", text)
    assert "model.to(torch.bfloat16)" in text
    assert "resize=" not in text


def test_an_optimizer_of_another_class_needs_retype(ckpt: tierfall.Checkpointer) -> None:
    live = make(kind=torch.optim.Adam)
    parts = ["model", "optimizer"]
    text = refused(lambda: ckpt.restore(live, only=parts))
    assert re.search(r"optimizer.*AdamW.*Adam", text)
    assert "retype" in text
    ckpt.restore(live, only=parts, retype=["optimizer"])
    assert live["optimizer"].state[live["model"].body.weight]["step"] == 2


def test_the_state_dict_of_an_optimizer_in_place_of_the_object_is_refused(
    ckpt: tierfall.Checkpointer,
) -> None:
    live = make(steps=1)
    state = {"model": live["model"], "optimizer": live["optimizer"].state_dict()}
    assert "optimizer" in refused(lambda: ckpt.restore(state, only=["model", "optimizer"]))


def test_an_expanded_tensor_is_refused_as_a_target(place: Place) -> None:
    place.config()
    with place.open() as ckpt:
        ckpt.save(1, {"w": torch.ones(4, 3), "o": torch.ones(3)}, block=True)
        other = torch.zeros(3)
        text = refused(lambda: ckpt.restore({"w": torch.zeros(3).expand(4, 3), "o": other}))
        assert "w" in text
        assert "clone" in text
        assert not other.any(), "nothing is written before all fits"


def test_parameter_groups_may_be_in_another_order(place: Place) -> None:
    def grouped(model: Net, *, turned: bool) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [*model.body.parameters()], "lr": 0.5},
            {"params": [*model.head.parameters(), *model.embed.parameters()], "lr": 0.25},
        ]
        return torch.optim.SGD(groups[::-1] if turned else groups, lr=0.1, momentum=0.9)

    place.config()
    saved, live = Net(), Net()
    optimizer, other = grouped(saved, turned=False), grouped(live, turned=True)
    train({"model": saved, "optimizer": optimizer})
    with place.open() as ckpt:
        ckpt.save(1, {"model": saved, "optimizer": optimizer}, block=True)
        other.param_groups[0]["lr"] = other.param_groups[1]["lr"] = 9.0
        ckpt.restore({"model": live, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    for one, two in zip(saved.parameters(), live.parameters(), strict=True):
        left, right = optimizer.state[one], other.state[two]
        assert equal(right["momentum_buffer"], left["momentum_buffer"])
