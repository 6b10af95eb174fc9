"""What does not fit is reported with the argument that helps, by the kind of the mismatch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.rank_kit import config_of, save_on_ranks
from tierfall.errors import ConfigError, RestoreError

MakeConfig = Callable[..., dict[str, Any]]
Restore = Callable[..., str]


class Wrapper(nn.Module):
    """A model whose own attribute has the name of a wrapper's."""

    def __init__(self, inner: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, inner)


def make(words: int = 10, width: int = 4) -> dict[str, Any]:
    model = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, 3))
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


def test_a_rename_is_only_suggested_where_it_fits(restore: Restore) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a = base, nn.Linear(4, 2, bias=False)
            self.b = nn.Linear(2, 3, bias=False)

    model = make()["model"]
    model[1] = Adapter(model[1])
    text = restore({"model": model}, only=["model"])
    hints = dict(re.findall(r"rename=\{'([^']+)': '([^']+)'\}", text))
    assert hints == {
        "model.1.weight": "model.1.base.weight",
        "model.1.bias": "model.1.base.bias",
    }
    new = ["model.1.a", "model.1.b"]
    assert restore({"model": model}, only=["model"], rename=hints, skip=new) == ""
    # Of another class, or of another shape, an entry is none that could be renamed.
    state = make()
    text = restore(
        {"model": state["model"], "optimizers": torch.optim.SGD(state["model"].parameters())}
    )
    assert "rename={'optimizer'" not in text
    text = restore({"models": make(width=5)["model"], "optimizer": state["optimizer"]})
    assert "rename={'model'" not in text


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


def test_values_that_differ_between_ranks_name_the_rule_for_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 2, [1], lambda rank, step: {"w": torch.ones(2), "seen": 10 + rank})
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match="seen: differs between the ranks") as caught:
            ckpt.restore({"w": torch.zeros(2), "seen": 0})
        assert "on_resize='per_rank'" in str(caught.value)
        assert "skip=['seen']" in str(caught.value)
        seen = tierfall.item(0, on_resize="per_rank")
        ckpt.restore({"w": torch.zeros(2), "seen": seen})
    assert seen.value == 10


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2 in the environment"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "SLURM_NTASKS is 4 in the environment",
        ),
    ],
)
def test_open_names_the_variable_that_speaks_of_other_ranks(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    named: str,
) -> None:
    for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=named) as caught:
        tierfall.open(make_config())
    assert "if this process trains alone, unset" in str(caught.value)
