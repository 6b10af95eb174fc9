"""``tierfall.load``: a checkpoint as a nested dict, from anything that points to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierfall
from tests.steps import state_of, step_in
from tierfall.core.types.errors import ConfigError, RestoreError

MakeConfig = Callable[..., dict[str, Any]]
SHARD = "rank-00000-of-00001.safetensors"


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """A run with steps 1, 2 and 3 on disk, and 2 on far."""
    config = make_config(disk={}, far={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    return config


def step_folder(root: Path, step: int, attempt: int = 1) -> Path:
    return root / "run" / f"step-{step:08d}-a{attempt:04d}"


@pytest.mark.parametrize("path", ["tiers://run/step-00000003", "tiers://run.yaml"])
def test_a_path_of_a_step_is_answered_with_what_loads_one(path: str) -> None:
    with pytest.raises(ConfigError, match=r"not saved or loaded by a path; .*TierReader"):
        tierfall.load(path)


def test_a_renamed_run_says_how_it_was_named(config: dict[str, Any], tmp_path: Path) -> None:
    renamed = tmp_path / "copies" / "other"
    shutil.copytree(tmp_path / "disk" / "run", renamed)
    for path in (renamed, renamed.parent):
        with pytest.raises(RestoreError, match=r"other was written as run run, .*: name it run"):
            tierfall.load(path)
    renamed.rename(renamed.parent / "run")
    assert step_in(tierfall.load(renamed.parent)) == 3


@pytest.mark.parametrize("folder", ["lone", "run/step-00000003-a0001"])
def test_a_shard_that_was_copied_alone_says_what_opens_it(
    folder: str, config: dict[str, Any], tmp_path: Path
) -> None:
    lone = tmp_path / "copies" / folder / SHARD
    lone.parent.mkdir(parents=True)
    shutil.copy(step_folder(tmp_path / "disk", 3) / SHARD, lone)
    with pytest.raises(ConfigError, match=r"without the records.*safetensors\.torch\.load_file"):
        tierfall.load(lone)
    opened = safetensors.torch.load_file(lone)
    assert torch.equal(opened["w"], state_of(3)["w"])
