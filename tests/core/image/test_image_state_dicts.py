"""The state_dict() of a module in place of the module: filled where it is the module's memory, refused elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from image_help import make_image, restore
from torch import nn

from tierfall.core.state.omissions import omissions
from tierfall.core.types.errors import RestoreError

LOST = "does not share memory with the module"


class Hooked(nn.Linear):
    """One entry of its state_dict is a copy, which its load hook takes back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: self._halve(state, prefix)
        )

    @staticmethod
    def _halve(state: dict[str, Any], prefix: str) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2


class Counted(nn.Linear):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("keep_vars", [False, True])
def test_the_state_dict_of_a_plain_module_is_filled_in_place(keep_vars: bool) -> None:
    saved, live = tied(), tied()
    image, _ = make_image({"model": saved.state_dict()})
    restore({"model": live.state_dict(keep_vars=keep_vars)}, image)
    assert all(
        torch.equal(a, b)
        for a, b in zip(saved.state_dict().values(), live.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("make", "key"), [(Hooked, "weight"), (lambda: Counted(2, 2), "_extra_state")]
)
def test_what_would_not_reach_the_module_is_refused_by_name(make: Any, key: str) -> None:
    model = make()
    image, _ = make_image({"model": model.state_dict()})
    with pytest.raises(RestoreError, match=f"model.{key}: .*{LOST}"):
        restore({"model": model.state_dict()}, image)
    restore({"model": model.state_dict()}, image, skip=[f"model.{key}"])
    (text,) = omissions({"model": model.state_dict()})
    assert f"'{key}'" in text


@pytest.mark.parametrize("make", [tied, Hooked])
def test_an_average_is_restored_into_the_copy_of_a_state_dict(make: Any) -> None:
    average = copy.deepcopy(make().state_dict())
    image, _ = make_image({"average": average})
    live = copy.deepcopy(make().state_dict())
    restore({"average": live}, image)
    assert all(torch.equal(live[key], value) for key, value in average.items())
    assert [*omissions({"average": live})] == []
