"""A peer tier as one process alone sees it: a command, ``load``, a pointer, a run of one node."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

from tests.contract.trainer import Trainer
from tests.steps import memory_of
from tierfall.core.format.records import parse_attempt_record
from tierfall.policies.placement import place_copies

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    """Host memory, peers and a disk."""
    made = make_config(disk={})
    host, disk = made["tiers"]
    peers = {"name": "peers", "kind": "peer", "path": str(tmp_path / "peers")}
    return {**made, "tiers": [host, peers, disk]}


def kept_in(config: dict[str, Any]) -> Path:
    """The folder of what this node keeps for others, of a run with these tiers."""
    return Path(config["tiers"][1]["path"]) / memory_of(config).name / "run"


def test_what_is_kept_for_others_is_verified_and_survives_what_a_person_decides(
    config: dict[str, Any], tmp_path: Path, memory: Path, train: Callable[[Cli], Trainer]
) -> None:
    """A dead trainer, step 1 in host memory and among what is kept for others, and an attempt of 16 nodes."""
    cli = Cli(tmp_path, config)
    trainer = train(cli)
    trainer.tell("save 1")
    trainer.kill()
    record = tmp_path / "disk/run/attempts/a0001.json"
    attempt = parse_attempt_record(record.read_bytes(), what="attempt")
    losses = place_copies([f"n{node}" for node in range(16)], 1).node_losses
    record.write_bytes(replace(attempt, node_losses=losses).encode())
    kept_in(config).mkdir(parents=True)
    for image in memory_of(config).glob("*.image"):
        shutil.copy(image, kept_in(config))
    good = [line.split() for line in cli("verify").out.splitlines() if line.endswith("good")]
    assert {line[1] for line in good} == {"host", "peers", "disk"}
    assert "pinned 1@1 on host, disk" in cli("pin", "1").out
    cli("unpin", "1")
    shutil.rmtree(memory / "run")
    assert "peers: 1@1 survives no loss of a node for certain" in cli("ls").out
    cli("rm", "1", "--yes", "--even-the-last")
    assert cli.steps() == {"1@1": {"peers": "committed"}}, "until the next start"
    cli("latest", code=1)


FORECAST = ("check", "--size", "64KiB", "--image", "1GiB", "--save-every", "10m")


def test_check_forecasts_peer_memory_on_as_many_nodes_as_it_is_told(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Also where nothing of the tier is on this node: it is in use only while a job runs."""
    (tmp_path / "disk").mkdir()
    host, peers, disk = config["tiers"]
    host = {**host, "capacity": "4GiB"}
    peers = {**peers, "bandwidth": "16MiB/s"}
    cli = Cli(tmp_path, {**config, "tiers": [host, peers, disk]})
    found = cli.json(*FORECAST, "--ranks", "32", "--nodes", "4")["forecast"]
    forecast = next(tier for tier in found["tiers"] if tier["name"] == "peers")
    assert (forecast["copy_bytes"] >> 30, forecast["bytes_max"] >> 30) == (8, 16)
    assert forecast["copy_s"] == 8 * 1024 / 16
    sizes = {"sent_bytes": 8 << 30, "kept_bytes_max": 16 << 30}
    assert found["peer_memory"] == {"tier": "peers", **sizes}
    line = (
        "peers: each of 4 nodes sends 8 GiB of a checkpoint to 1 other and receives as much, and keeps 16 GiB at most "
        "in its memory"
    )
    assert line in cli(*FORECAST, "--ranks", "32", "--nodes", "4").out.splitlines()


@pytest.mark.parametrize(("interface", "code"), [("lo", 0), ("ib7", 1)])
def test_check_shows_where_other_nodes_send_their_images(
    config: dict[str, Any], tmp_path: Path, interface: str, code: int
) -> None:
    (tmp_path / "disk").mkdir()
    host, peers, disk = config["tiers"]
    peers = {**peers, "interface": interface}
    found = Cli(tmp_path, {**config, "tiers": [host, peers, disk]})("check", "--json", code=code)
    if code:
        assert "interface is ib7, and this node" in str(found.document["problems"])
    else:
        assert found.document["peer_address"] == {"interface": "lo", "address": "127.0.0.1"}
