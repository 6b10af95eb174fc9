"""``tierfall export --format dcp``: a folder that stock torch.distributed.checkpoint reads, or no folder."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierfall
from tests.rank_kit import config_of, export_from
from tierfall.config import Config
from tierfall.core.types.errors import BackendError
from tierfall.export.export import ExportFormat

ALONE = "ignore:torch.distributed is disabled"
MakeState = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path, make_state: MakeState) -> Config:
    """Step 1, of one rank."""
    config = config_of(tmp_path)
    state = make_state(5)
    state["extra"]["nested"] = {"names": ["a", "b"], 3: torch.arange(3)}
    state["empty"] = torch.empty(0, 4)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    return config


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.filterwarnings(ALONE)
def test_dcp_loads_model_and_optimizer_by_its_own_names(
    config: Config, out: Path, make_state: MakeState
) -> None:
    done = export_from(config, "shared", to=out, format=ExportFormat.DCP)
    assert done.path == out
    assert done.bytes == sum(file.stat().st_size for file in out.iterdir())
    model, optimizer = fresh()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=out, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    saved = make_state(5)
    for one, other in zip(model.parameters(), saved["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        for name, value in saved["optimizer"].state[other].items():
            assert torch.equal(optimizer.state[one][name], value), name


@pytest.mark.filterwarnings(ALONE)
def test_dcp_loads_a_scaler_as_it_saves_one(tmp_path: Path, out: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    with tierfall.open(config := config_of(tmp_path)) as ckpt:
        ckpt.save(1, {"scaler": scaler}, block=True)
    export_from(config, "shared", to=out, format=ExportFormat.DCP)
    loaded = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    assert loaded["scaler"] == scaler.state_dict()


def test_an_empty_folder_gives_way_and_nothing_else_does(config: Config, out: Path) -> None:
    out.mkdir(parents=True)
    export_from(config, "shared", to=out, format=ExportFormat.DCP)
    before = sorted(out.iterdir())
    with pytest.raises(BackendError, match="is there already; name a folder"):
        export_from(config, "shared", to=out, format=ExportFormat.DCP, replace=True)
    assert sorted(out.iterdir()) == before
    file = out.parent / "file"
    file.write_text("mine")
    with pytest.raises(BackendError, match="is there already"):
        export_from(config, "shared", to=file, format=ExportFormat.DCP)
    with pytest.raises(BackendError, match="is no folder"):
        export_from(config, "shared", to=file / "below", format=ExportFormat.DCP)


def test_an_optimizer_that_does_not_know_its_parameters_keeps_their_numbers(
    tmp_path: Path, out: Path
) -> None:
    config = config_of(tmp_path)
    model, optimizer = fresh()
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"optimizer": optimizer, "rng": None}, block=True)
    export_from(config, "shared", to=out, format=ExportFormat.DCP)
    names = pickle.loads((out / ".metadata").read_bytes()).state_dict_metadata
    assert "optimizer.state.0.exp_avg" in names
