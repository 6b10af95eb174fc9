"""``tierfall.load``: a checkpoint as a nested dict, from anything that points to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

import tierfall
from tests.steps import files_below, state_of, step_in
from tierfall.core.types.errors import ConfigError, RestoreError, StepError, TierfallError

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


@pytest.mark.parametrize(
    ("device", "output"),
    [
        ("gpu", "Expected one of cpu, cuda"),
        ("cuda:99", ""),
        (None, "expected one such as 'cpu'"),
        ({"cuda": "cpu"}, "expected one such as 'cpu'"),
    ],
)
def test_a_device_that_is_not_there_is_reported_before_anything_is_read(
    device: Any, output: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"is not a device that can be used here: .*{output}"):
        tierfall.load(tmp_path / "nowhere", map_location=device)


@pytest.mark.parametrize("number", ["3", True, 1.0, [3]])
def test_a_step_or_attempt_that_is_no_integer_is_refused(
    number: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    for source in (config, tmp_path / "disk"):
        with pytest.raises(StepError, match="load: step must be an integer"):
            tierfall.load(source, step=number)
        with pytest.raises(StepError, match="load: attempt must be an integer"):
            tierfall.load(source, step=1, attempt=number)


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
    with pytest.raises(RestoreError, match="lineage was abandoned"):
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
        ("nowhere", "does not exist"),
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


@pytest.mark.parametrize("path", ["tiers://run/step-00000003", "tiers://run.yaml"])
def test_a_path_of_a_step_is_answered_with_what_loads_one(path: str) -> None:
    with pytest.raises(ConfigError, match=r"not saved or loaded by a path; .*TierReader"):
        tierfall.load(path)


@pytest.mark.parametrize("place", ["sc/step-00000003-a0001", "run/step-00000009-a0001", "my copy"])
def test_a_copied_step_says_where_it_belongs_and_loads_there(
    place: str, config: dict[str, Any], tmp_path: Path
) -> None:
    step = step_folder(tmp_path / "disk", 3)
    copied = tmp_path / "copies" / place
    shutil.copytree(step, copied)
    belongs = r"below a folder named run, as it was written \(run/step-0+3-a0001\)"
    wanted = rf"((speaks|is the record) of run 3@1|under another name).*{belongs}"
    with pytest.raises(TierfallError, match=wanted):
        tierfall.load(copied)
    with pytest.raises(TierfallError, match="below a folder named" if "/" in place else "RUN/step"):
        tierfall.load(copied / SHARD)
    home = tmp_path / "home" / "run" / step.name
    shutil.copytree(copied, home)
    assert step_in(tierfall.load(home)) == step_in(tierfall.load(home / SHARD)) == 3


def test_a_copied_step_below_a_folder_that_names_no_run_says_where_it_belongs(
    config: dict[str, Any], tmp_path: Path
) -> None:
    step = step_folder(tmp_path / "disk", 3)
    copied = tmp_path / "my copies" / step.name
    shutil.copytree(step, copied)
    for path in (copied, copied / SHARD):
        with pytest.raises(ConfigError, match="below a folder named run, as it was written"):
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
