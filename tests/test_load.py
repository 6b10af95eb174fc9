"""``tierfall.load``: a checkpoint as a nested dict, from whatever points to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tierfall
from tests.steps import files_below, state_of, step_in
from tierfall.core.errors import ConfigError, RestoreError

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


def test_every_way_to_name_the_newest(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump(config))
    ways: list[Any] = [
        config,
        tierfall.Config.model_validate(config),
        file,
        str(file),
        tmp_path / "disk",
        str(tmp_path / "disk") + "/",
        tmp_path / "disk/run",
        step_folder(tmp_path / "disk", 3),
        step_folder(tmp_path / "disk", 3) / SHARD,
    ]
    for way in ways:
        assert step_in(tierfall.load(way)) == 3, way


def test_every_way_to_name_an_older_one(config: dict[str, Any], tmp_path: Path) -> None:
    assert step_in(tierfall.load(config, step=1)) == 1
    assert step_in(tierfall.load(tmp_path / "disk", step=2)) == 2
    assert step_in(tierfall.load(tmp_path / "disk/run", step=2, attempt=1)) == 2
    assert step_in(tierfall.load(step_folder(tmp_path / "disk", 1))) == 1
    assert step_in(tierfall.load(step_folder(tmp_path / "disk", 1) / SHARD)) == 1
    assert step_in(tierfall.load(tmp_path / "far")) == 2


def test_a_relative_path_and_one_through_a_link(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert step_in(tierfall.load("disk")) == 3
    (tmp_path / "link").symlink_to(step_folder(tmp_path / "disk", 2))
    assert step_in(tierfall.load("link")) == 2


def test_what_each_state_dict_returned_comes_back(
    make_config: MakeConfig, make_state: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    state = make_state(1)
    state["nested"] = {"list": [1, (2.5, None)], "tensor": torch.arange(3)}
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state, block=True)
    loaded = tierfall.load(tmp_path / "disk")
    assert set(loaded) >= {"model", "optimizer", "extra", "nested"}
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)
    wanted = state["optimizer"].state_dict()
    assert loaded["optimizer"]["param_groups"] == wanted["param_groups"]
    for number, moments in wanted["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(loaded["optimizer"]["state"][number][name], tensor)
    assert loaded["extra"] == {"epoch": 1}
    assert loaded["nested"]["list"] == [1, (2.5, None)]
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    model.load_state_dict(loaded["model"])


def test_tensors_come_to_the_device_that_is_asked_for(config: dict[str, Any]) -> None:
    for device in ("cpu", torch.device("cpu")):
        assert tierfall.load(config, map_location=device)["w"].is_cpu


def test_loading_changes_nothing(config: dict[str, Any], tmp_path: Path, memory: Path) -> None:
    before, held = files_below(tmp_path), files_below(memory)
    tierfall.load(config)
    tierfall.load(tmp_path / "disk")
    tierfall.load(step_folder(tmp_path / "disk", 1) / SHARD)
    assert files_below(tmp_path) == before
    assert files_below(memory) == held


def test_loading_beside_a_living_trainer_sees_what_lies_in_memory(make_config: MakeConfig) -> None:
    config = make_config(disk={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        assert step_in(tierfall.load(config)) == 1
        ckpt.save(2, state_of(2), block=True)
        assert step_in(tierfall.load(config)) == 2
        ckpt.save(3, state_of(3), block=True)


def test_an_abandoned_step_is_loaded_by_step_and_attempt_only(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={}, far={"shared": True, "flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state_of(step), block=True)
    with tierfall.open(config) as ckpt:
        ckpt.restore(state_of(-1), step=2)
        ckpt.save(3, state_of(3), block=True)
    assert step_in(tierfall.load(config)) == 3
    assert step_in(tierfall.load(config, step=4, attempt=1)) == 4
    assert step_in(tierfall.load(step_folder(tmp_path / "far", 4))) == 4
    with pytest.raises(RestoreError, match="left behind"):
        tierfall.load(config, step=4)


def test_a_damaged_shard_is_taken_from_the_next_tier_where_the_configuration_names_one(
    config: dict[str, Any], tmp_path: Path
) -> None:
    shard = step_folder(tmp_path / "disk", 2) / SHARD
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert step_in(tierfall.load(config, step=2)) == 2
    with pytest.raises(RestoreError, match="damaged"):
        tierfall.load(shard)
    assert step_in(tierfall.load(tmp_path / "disk")) == 3


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere", "is not there"),
        ("disk/run/latest", "is not a shard"),
        ("disk/run/attempts", "no run of tierfall"),
        ("far/..", "no run of tierfall"),
    ],
)
def test_a_path_that_leads_to_no_checkpoint_says_what_was_expected(
    path: str, says: str, config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        tierfall.load(tmp_path / path)


def test_a_root_with_two_runs_asks_for_one(make_config: MakeConfig, tmp_path: Path) -> None:
    for run in ("a", "b"):
        with tierfall.open(make_config(run=run)) as ckpt:
            ckpt.save(1, state_of(1), block=True)
    with pytest.raises(ConfigError, match="the runs a, b: name one"):
        tierfall.load(tmp_path / "disk")
    assert step_in(tierfall.load(tmp_path / "disk/b")) == 1


def test_nothing_to_load_says_so(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()):
        pass
    with pytest.raises(RestoreError, match="holds no checkpoint"):
        tierfall.load(make_config())
