"""A peer tier as one process alone sees it: a command, ``load``, a pointer, a run of one node."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import state_of

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    """Host memory, peers and a disk."""
    made = make_config(disk={})
    host, disk = made["tiers"]
    peers = {"name": "peers", "kind": "peer", "path": str(tmp_path / "peers")}
    return {**made, "tiers": [host, peers, disk]}


def test_a_run_of_one_node_leaves_the_tier_out(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierfall")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        assert [*ckpt.checkpoints()[0].tiers] == ["host", "disk"]
        ckpt.write_pointer(tmp_path / "pointer", 1)
    assert "open: there is one node, so tier peers is left out" in caplog.messages
    assert not (tmp_path / "peers").exists()
    assert tierfall.load(config).keys() == tierfall.load(tmp_path / "pointer").keys()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("command", ["ls", "pin 1", "rm 1 --yes", "prune", "drain", "verify"])
def test_commands_work_on_any_node(
    config: dict[str, Any], tmp_path: Path, command: str, keeps: bool
) -> None:
    """Also on one that keeps nothing for others, where the folder is not there."""
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    if keeps:
        (tmp_path / "peers").mkdir()
    Cli(tmp_path, config)(*command.split())


def test_a_command_shows_what_this_node_keeps(config: dict[str, Any], tmp_path: Path) -> None:
    """What was sent to it is in a folder for each number of a copy, which is no run."""
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    shutil.copytree(config["tiers"][2]["path"], tmp_path / "peers" / "2")
    (tmp_path / "peers" / "0").mkdir()
    assert "peers" in Cli(tmp_path, config)("ls").out
    Cli(tmp_path, config)("verify", "1", "--tier", "peers")
    known = Cli(tmp_path, {**config, "run": "another"})("ls", code=-1)
    assert f"the tiers have the runs {config['run']}" in known.out + known.err
