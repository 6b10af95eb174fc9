"""What does not fit is reported with the argument that helps, by the kind of the mismatch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tierfall.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]
Restore = Callable[..., str]


class Wrapper(nn.Module):
    """A model whose own attribute has the name of a wrapper's."""

    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)


def make(words: int = 10, width: int = 4, renamed: str = "", more: int = 0) -> dict[str, Any]:
    layers: dict[str, nn.Module] = {"0": nn.Embedding(words, width), "1": nn.Linear(width, 3)}
    if renamed:
        layers = {"0": layers["0"], renamed: layers["1"]}
    layers |= {f"more{number}": nn.Linear(3, 3) for number in range(more)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def restore(make_config: MakeConfig) -> Restore:
    """Restore the state of ``make()`` into another one; returns the text of the error, or of none."""
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, make(), block=True)

    def call(state: dict[str, Any], **how: Any) -> str:
        with tierfall.open(config) as ckpt:
            try:
                ckpt.restore(state, **how)
            except RestoreError as error:
                return str(error)
        return ""

    return call


def test_a_rename_to_a_name_that_is_not_in_the_state_is_named_as_given(restore: Restore) -> None:
    """What the error proposes has the names of the checkpoint, by which a rename is looked up."""
    text = restore(make(), rename={"model": "modle"})
    assert "it is 'model' in the checkpoint: leave out that rename" in text
    assert "rename={'modle'" not in text
    assert "did you mean" not in text
    state = make()
    other = {"models": state["model"], "optimizer": state["optimizer"]}
    text = restore(other, rename={"model": "modle"})
    assert "rename={'model': 'models'}?" in text
    assert restore({"models": state["model"]}, rename={"model": "models"}, only=["models"]) == ""


@pytest.mark.parametrize("name", ["module", "net"])
def test_a_prefix_that_all_names_have_is_named_with_the_rename_that_helps(
    restore: Restore, make_config: MakeConfig, name: str
) -> None:
    state = {"model": Wrapper(make()["model"], name)}
    text = restore(state, only=["model"])
    assert f"all names have the prefix '{name}.' in the state, and not in the checkpoint" in text
    assert ("import removes it" in text) == (name == "module")
    assert f"rename={{'model': 'model.{name}'}}" in text
    assert "1 place:" in text
    assert restore(state, only=["model"], rename={"model": f"model.{name}"}) == ""
    with tierfall.open(make_config(run="wrapped")) as ckpt:
        ckpt.save(1, {"models": [state["model"]]}, block=True)
        with pytest.raises(RestoreError, match=rf"rename={{'models\.0\.{name}': 'models\.0'}}"):
            ckpt.restore({"models": [make()["model"]]})
        ckpt.restore({"models": [make()["model"]]}, rename={f"models.0.{name}": "models.0"})
        outer = {"models": [Wrapper(state["model"], "outer")]}
        with pytest.raises(RestoreError, match=r"rename={'models\.0': 'models\.0\.outer'}"):
            ckpt.restore(outer)
        ckpt.restore(outer, rename={"models.0": "models.0.outer"})


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        ({"renamed": "one"}, ["rename"]),
        ({"more": 1}, ["skip"]),
        ({"more": 9}, ["skip", "strict"]),
        ({"width": 6}, ["resize"]),
    ],
)
def test_the_arguments_that_restore_what_fits_are_ready_to_be_copied(
    restore: Restore, changed: dict[str, Any], arguments: list[str]
) -> None:
    text = restore(make(**changed))
    call = text.partition("To restore what fits: restore(..., ")[2].removesuffix(")")
    given = eval(f"dict({call})")
    assert list(given) == arguments
    assert restore(make(**changed), **given) == ""


def test_no_arguments_are_proposed_if_none_restores_the_rest(restore: Restore) -> None:
    text = restore({"model": make()["model"].bfloat16(), "more": torch.ones(2)}, only=["model"])
    assert "converts no dtype" in text
    assert "To restore what fits" not in text
