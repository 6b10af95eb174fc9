"""``import`` into a run that another node trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_kit import Cli

from tests.steps import files_below

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


@pytest.fixture
def cli(make_cli: MakeCli, tmp_path: Path) -> Cli:
    for name in ("disk", "far"):
        (tmp_path / name).mkdir()
    return make_cli(disk={}, far={"flush": {"every": 100}})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of torch.save with a model of two tensors, in a DDP wrapper, and a value."""
    path = tmp_path / "c.pt"
    model = {"module.weight": torch.arange(6.0).view(2, 3), "module.bias": torch.ones(2)}
    torch.save({"model": model, "epoch": 3}, path)
    return path


def test_a_run_that_another_node_trains_is_left_alone(
    cli: Cli, saved: Saved, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(cli, [1])
    monkeypatch.setattr("socket.gethostname", lambda: "another-node")
    before = files_below(tmp_path)
    answer = cli("import", str(path), "--as-step", "40", code=1)
    assert "an import would end its trainer, if that is alive" in answer.err
    assert files_below(tmp_path) == before
    cli("import", str(path), "--as-step", "40", "--run", "fine-tuned")
