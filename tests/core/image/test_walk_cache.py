"""A walk that uses the cache of the last one finds what a walk without a cache finds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.core.state.view import StateView
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.types.errors import CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.square = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)


class Run:
    """A state whose second walk recalls the first."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loose = torch.arange(6.0)
        self.state: dict[str, Any] = {
            "loose": self.loose,
            "model": self.model,
            "optimizer": self.optimizer,
            "extra": {"epoch": 3},
        }
        self.step()

    def step(self) -> None:
        hidden = self.model.square(self.model.norm(self.model.first(torch.randn(5, 3))))
        self.model.last(hidden).sum().backward()
        self.optimizer.step()


def seen(view: StateView) -> dict[str, Any]:
    """All that a walk found, but what is made anew by each: the random state."""
    kept = [
        (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *more)
        + (tensor.requires_grad,)
        for name, tensor, *more in zip(
            view.names, view.sources, view.changes, view.trails, view.plain, strict=True
        )
        if not name.startswith("rng")
    ]
    return {
        "tensors": kept,
        "structure": view.structure,
        "values": view.values,
        "parameters": [*view.parameters.items()],
        "optimizers": [id(optimizer) for optimizer in view.optimizers],
    }


def swap_storage(run: Run) -> None:
    run.model.first.weight.data = run.model.first.weight.data.clone()


def turn(run: Run) -> None:
    run.model.square.weight.data = run.model.square.weight.data.t()  # the same memory and shape


def reshape(run: Run) -> None:
    run.model.first.weight.data = run.model.first.weight.data.view(3, 4)


def narrow(run: Run) -> None:
    run.model.last.weight.data = run.model.last.weight.data.to(torch.bfloat16)


def reread(run: Run) -> None:
    bias = run.model.last.bias.requires_grad_(False)
    bias.data = bias.data.view(torch.int32)  # the same memory


def freeze(run: Run) -> None:
    run.model.first.weight.requires_grad_(False)


def add_buffer(run: Run) -> None:
    run.model.register_buffer("more", torch.ones(2))


def make_buffer_of_parameter(run: Run) -> None:
    weight = run.model.last.weight.detach()
    del run.model.last.weight
    run.model.last.register_buffer("weight", weight)
    run.optimizer = torch.optim.Adam([run.model.first.weight])
    run.state["optimizer"] = run.optimizer


def rename(run: Run) -> None:
    run.model.final = run.model.last
    del run.model.last


def tie(run: Run) -> None:
    run.model.norm.bias = run.model.first.bias


def alias_from_outside(run: Run) -> None:
    run.state["loose"] = run.model.norm.weight.detach()


def alias_from_outside_later(run: Run) -> None:
    run.state["again"] = tierfall.item(run.model.norm.weight.detach(), changes="anytime")


def loose_elsewhere(run: Run) -> None:
    run.state["loose"] = run.loose.clone()


def loose_twice(run: Run) -> None:
    run.state["again"] = run.loose


def loose_read_otherwise(run: Run) -> None:
    run.state["loose"] = run.loose.view(2, 3)


def loose_within_parameter(run: Run) -> None:
    run.state["loose"] = run.model.square.weight.detach().view(-1)[:6]


def take_its_name(run: Run) -> None:
    run.model.first.register_buffer("weight%d9", torch.ones(1))
    run.model.register_buffer("norm%", torch.ones(1))


def come_earlier(run: Run) -> None:
    run.state = {"before": torch.ones(1), **run.state}


def come_earlier_with_a_value(run: Run) -> None:
    run.state = {"before": {"x": 1}, **run.state}


def leave(run: Run) -> None:
    del run.state["loose"]


def rule(run: Run) -> None:
    run.state["model"] = tierfall.item(run.model, changes="anytime")


def rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.5


def fresh_moments(run: Run) -> None:
    for held in run.optimizer.state.values():
        held.update({k: v.clone() for k, v in held.items() if isinstance(v, torch.Tensor)})


def more_state(run: Run) -> None:
    run.optimizer.state[run.model.first.weight]["extra"] = torch.ones(3)


def plain_number_in_state(run: Run) -> None:
    run.optimizer.state[run.model.first.weight]["step"] = 7


def reorder_state(run: Run) -> None:
    held = run.optimizer.state
    first = next(iter(held))
    held[first] = held.pop(first)


def odd_key_in_state(run: Run) -> None:
    for held in run.optimizer.state.values():
        held[1] = held.pop("exp_avg")


def other_optimizer(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.state["optimizer"] = run.optimizer
    run.step()


def swap_groups(run: Run) -> None:
    parameters = run.optimizer.param_groups[0]["params"]
    parameters.append(parameters.pop(0))


def keep_a_graph(run: Run) -> None:
    run.model.state_dict = lambda: dict(run.model.named_parameters())  # type: ignore[method-assign]


def wrap(run: Run) -> None:
    run.state["model"] = nn.DataParallel(run.model)


def one_step_for_all(run: Run) -> None:
    step = torch.tensor(3.0)
    for held in run.optimizer.state.values():
        held["step"] = step


def replace_parameter(run: Run) -> None:
    """The optimizer's tensors stay, and belong to another parameter."""
    old, parameters = run.model.first.weight, run.optimizer.param_groups[0]["params"]
    run.model.first.weight = nn.Parameter(old.detach())
    parameters[0] = run.model.first.weight
    run.optimizer.state = {
        run.model.first.weight if key is old else key: value
        for key, value in run.optimizer.state.items()
    }  # type: ignore[assignment]


def same_memory_in_another_place(run: Run) -> None:
    run.model.norm.running_mean, run.model.norm.running_var = (
        run.model.norm.running_var,
        run.model.norm.running_mean,
    )


class Halved(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()[:2]


def change_class(run: Run) -> None:
    run.model.square.__class__ = Halved


def save_otherwise(run: Run) -> None:
    linear = run.model.square
    linear._save_to_state_dict = lambda *args: Halved._save_to_state_dict(linear, *args)  # type: ignore[method-assign]


def drop_bias(run: Run) -> None:
    run.model.last.bias = None


def add_module(run: Run) -> None:
    run.model.first.add_module("adapter", nn.Linear(2, 2))


def nothing(run: Run) -> None:
    """Most saves."""


def values_only(run: Run) -> None:
    run.step()
    run.state["extra"]["epoch"] = 4


KINDS: list[Callable[[Run], None]] = [
    swap_storage,
    turn,
    reshape,
    narrow,
    reread,
    freeze,
    add_buffer,
    make_buffer_of_parameter,
    rename,
    tie,
    alias_from_outside,
    alias_from_outside_later,
    loose_elsewhere,
    loose_twice,
    loose_read_otherwise,
    loose_within_parameter,
    take_its_name,
    come_earlier,
    come_earlier_with_a_value,
    leave,
    rule,
    rate,
    fresh_moments,
    more_state,
    plain_number_in_state,
    reorder_state,
    odd_key_in_state,
    other_optimizer,
    swap_groups,
    keep_a_graph,
    wrap,
    one_step_for_all,
    replace_parameter,
    same_memory_in_another_place,
    change_class,
    save_otherwise,
    drop_bias,
    add_module,
    nothing,
    values_only,
]


@pytest.mark.parametrize("change", KINDS)
def test_whatever_changed_between_saves_is_seen(change: Callable[[Run], None]) -> None:
    run, recall = Run(), WalkCache()
    assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))
    assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))
    change(run)
    for _ in range(2):
        assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))


@pytest.mark.parametrize("alias", [alias_from_outside, alias_from_outside_later, loose_twice])
def test_an_alias_that_goes_leaves_nothing(alias: Callable[[Run], None]) -> None:
    run, recall = Run(), WalkCache()
    for _ in range(2):
        alias(run)
        for _ in range(3):
            assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))
        run.state.pop("again", None)
        run.state["loose"] = run.loose
        for _ in range(3):
            assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))


def test_an_alias_of_the_second_of_two_at_one_address_stays_one() -> None:
    module, recall = nn.Module(), WalkCache()
    memory = torch.arange(12.0)
    module.register_buffer("row", memory[:4])
    module.register_buffer("square", memory[:4].view(2, 2))
    state = {"module": module, "again": module.square, "rng": None}
    for _ in range(3):
        assert seen(walk_state(state, recall)) == seen(walk_state(state))


def test_nothing_is_kept_alive_between_walks() -> None:
    run, recall = Run(), WalkCache()
    walk_state(run.state, recall)
    walk_state(run.state, recall)
    held = [weakref.ref(each) for each in (run.model, *run.model.parameters())]
    held += [weakref.ref(each["exp_avg"]) for each in run.optimizer.state.values()]
    run.state.clear()
    del run
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_a_class_that_is_given_a_state_dict_of_its_own_is_asked_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, recall = Run(), WalkCache()
    for _ in range(2):
        walk_state(run.state, recall)
    whole = nn.Module.state_dict

    def doubled(module: Net, *args: Any, **kwargs: Any) -> Any:
        return {key: 2 * value for key, value in whole(module, *args, **kwargs).items()}

    monkeypatch.setattr(Net, "state_dict", doubled)
    view = walk_state(run.state, recall)
    weight = view.sources[view.names.index("model.first.weight")]
    assert torch.equal(weight, 2 * run.model.first.weight)


def test_a_hook_that_came_and_went_leaves_nothing() -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, more: object) -> None:
        for key in list(state):
            state[f"renamed_{key}"] = state.pop(key)

    run, recall = Run(), WalkCache()
    for _ in range(2):
        walk_state(run.state, recall)
        hook = run.model.register_state_dict_post_hook(rename)
        for _ in range(2):
            assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))
        hook.remove()
        assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))


def test_a_module_within_that_gets_a_hook_or_hides_another_buffer_is_seen() -> None:
    run, recall = Run(), WalkCache()
    for module in (run.model.norm, run.model.first):
        module.register_buffer("scratch", torch.ones(2), persistent=module is run.model.first)
    for _ in range(2):
        walk_state(run.state, recall)
    run.model.norm._non_persistent_buffers_set.clear()
    run.model.first._non_persistent_buffers_set.add("scratch")
    assert seen(walk_state(run.state, recall)) == seen(walk_state(run.state))
    run.model.last.register_state_dict_pre_hook(
        lambda module, prefix, keep: module.bias.data.add_(1)
    )
    before = run.model.last.bias.detach().clone()
    walk_state(run.state, recall)
    assert torch.equal(run.model.last.bias, before + 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make", [lambda: torch.nested.nested_tensor([torch.ones(4)]), lambda: torch.eye(2).to_sparse()]
)
def test_a_tensor_that_became_nested_or_sparse_is_walked_as_at_first(
    make: Callable[[], torch.Tensor],
) -> None:
    """torch ends the process if its guards meet a nested tensor."""

    def outcome(recall: WalkCache | None) -> Any:
        try:
            return seen(walk_state(run.state, recall))
        except CaptureError as error:
            return str(error)

    run, recall = Run(), WalkCache()
    walk_state(run.state, recall)
    for held in run.optimizer.state.values():
        held["exp_avg"] = make()
    assert outcome(recall) == outcome(None)
