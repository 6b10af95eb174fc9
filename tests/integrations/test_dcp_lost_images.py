"""dcp.load needs the headers of all ranks' images: a step that lacks one gives way to an older one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.integrations.dcp_help import QUIET
from tests.rank_kit import config_of, save_on_ranks
from tierfall.config import Config
from tierfall.integrations.dcp import TierReader
from tierfall.run.checkpointer import Checkpointer

pytestmark = pytest.mark.filterwarnings(QUIET)
RANKS = 3


def state_of(rank: int, step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    return {
        "model": model,
        "buffer": torch.arange(5),
        "rank": rank,
        "rng": None,
        **({"note": "of rank 1"} if rank == 1 else {}),
    }


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_of(tmp_path, disk={})
    save_on_ranks(config, RANKS, [1], state_of)
    shutil.rmtree(tmp_path / "memory")
    return config


def empty() -> dict[str, Any]:
    found = state_of(0, 7)
    return {"model": found["model"].state_dict(), "buffer": torch.zeros(5).long(), "rank": -1}


def load(state: dict[str, Any], ckpt: Checkpointer, rank: int = 2) -> dict[str, Any]:
    dcp.load(state, storage_reader=TierReader(ckpt, values_of=rank), no_dist=True)
    return state


def is_loaded(state: dict[str, Any], rank: int = 2) -> bool:
    expected = state_of(rank, 1)
    weights = expected["model"].state_dict()
    return (
        all(torch.equal(state["model"][name], weights[name]) for name in weights)
        and torch.equal(state["buffer"], expected["buffer"])
        and state["rank"] == rank
    )


def test_a_step_that_lacks_another_ranks_image_gives_way_to_an_older_one(
    config: Config, tmp_path: Path
) -> None:
    with Checkpointer(config) as ckpt:
        assert is_loaded(load(empty(), ckpt))
    save_on_ranks(config, RANKS, [2], state_of, go_on=True)
    shutil.rmtree(tmp_path / "memory")
    for rank in (0, 1):
        (manifest,) = tmp_path.glob(f"disk/run/step-00000002-*/rank-0000{rank}-of-00003.json")
        manifest.unlink()
    with Checkpointer(config) as ckpt:
        assert is_loaded(load(empty(), ckpt)), "step 1"
