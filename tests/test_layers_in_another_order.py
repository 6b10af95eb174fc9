"""The state of an imported optimizer goes to the parameters that it is of, or a restore refuses it by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tierfall
from tierfall.cli import app


class Net(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(2, 2, bias=False))


@pytest.fixture
def config(make_config: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "disk").mkdir()
    return make_config(disk={})


def bring_in(config: dict[str, Any], path: Path, state: dict[str, Any]) -> None:
    torch.save({name: part.state_dict() for name, part in state.items()}, path)
    settings = path.with_name("tiers.yaml")
    settings.write_text(repr(config).replace("'", '"').replace("True", "true"))
    words = ["import", str(path), "--as-step", "5", "--config", str(settings)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr


def test_groups_of_another_order_than_the_model_are_restored(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """The order of the groups is the program's own; the model's order is what is compared."""

    def make() -> tuple[Net, torch.optim.Optimizer]:
        net = Net("body", "head")
        groups = [{"params": net.head.parameters(), "lr": 0.5}, {"params": net.body.parameters()}]
        return net, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    net, optimizer = make()
    (net.head(net.body(torch.ones(1, 2))) * 3).sum().backward()
    optimizer.step()
    bring_in(config, tmp_path / "old.pt", {"model": net, "optimizer": optimizer})
    other, moments = make()
    with tierfall.open(config) as ckpt:
        ckpt.restore({"model": other, "optimizer": moments})
    for name in ("head", "body"):
        left = optimizer.state[getattr(net, name).weight]["momentum_buffer"]
        right = moments.state[getattr(other, name).weight]["momentum_buffer"]
        assert torch.equal(left, right)
