"""``import``: its output, in words and as a document, its errors, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_kit import ROOT, Cli, Trainer

import tierfall
from tests.steps import files_below, wait_until

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


def test_an_import_says_what_it_did(cli: Cli, path: Path) -> None:
    answer = cli("import", str(path), "--as-step", "40")
    lines = answer.out.splitlines()
    assert lines[0].startswith(f"imported {path} (torch) as 40@1 to disk, far: 2 tensors, ")
    assert lines[1] == "entries of the state: model, epoch"
    assert lines[2].startswith("note: removed the prefixes of wrappers")
    assert cli.steps() == {"40@1": {"disk": "committed", "far": "committed"}}
    assert cli("latest").out == "40@1\n"
    assert cli("verify").out.endswith("nothing is damaged\n")
    loaded = tierfall.load(cli.config)
    assert loaded["model"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["epoch"] == 3


def test_an_import_is_a_document_too(cli: Cli, path: Path, tmp_path: Path) -> None:
    document = cli.json("import", str(path), "--as-step", "40", "--run", "other")
    assert (document["run"], document["step"], document["attempt"]) == ("other", 40, 1)
    assert (document["format"], document["entries"]) == ("torch", ["model", "epoch"])
    assert (document["tiers"], document["left"]) == (["disk", "far"], [])
    assert (tmp_path / "disk/other/step-00000040-a0001/commit.json").exists()


def test_what_cannot_be_imported_changes_nothing(cli: Cli, path: Path, tmp_path: Path) -> None:
    cli("import", str(path), "--as-step", "40")
    before = files_below(tmp_path)
    for step, why in (("40", "has it already"), ("39", "has the newer step 40@1")):
        answer = cli("import", str(path), "--as-step", step, code=1)
        assert f"step {step} of run 'run': the run {why}" in answer.err
        assert answer.err.count("\n") == 1
    assert "cannot be read" in cli("import", "nothing.pt", "--as-step", "41", code=2).err
    assert (
        "expected a name"
        in cli("import", str(path), "--as-step", "41", "--entry", "a.b", code=2).err
    )
    assert "--as-step" in cli("import", str(path), code=2).err
    assert files_below(tmp_path) == before


def test_beside_a_trainer_nothing_is_imported(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], path: Path, tmp_path: Path
) -> None:
    cli = make_cli(disk={})
    trainer = train(cli)
    trainer.tell("save 1")
    answer = cli("import", str(path), "--as-step", "40", code=1)
    assert f"import: a trainer owns run 'run' (process {trainer.pid} on " in answer.err
    assert "nothing was imported" in answer.err
    assert trainer.tell("save 2") is not None
    trainer.close()


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


def test_a_kill_within_an_import_leaves_nothing_that_counts(
    cli: Cli, saved: Saved, tmp_path: Path
) -> None:
    """The disk is slow, so that the kill comes while the image is being written."""
    saved(cli, [1])
    torch.save({"w": torch.ones(4_000_000)}, tmp_path / "big.pt")
    config = cli.config
    for tier in config["tiers"]:
        if tier["name"] == "disk":
            tier["bandwidth"] = "2MB/s"
    cli.configure(config)
    words = ["import", str(tmp_path / "big.pt"), "--as-step", "40", "--config", str(cli.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tierfall", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    step = tmp_path / "disk/run/step-00000040-a0002"
    try:
        wait_until(
            lambda: any(file.stat().st_blocks for file in step.glob("*")), "the image begins", 120
        )
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (step / "commit.json").exists()
    assert cli("latest").out == "1@1\n"
    assert tierfall.load(cli.config)["extra"] == {"step": 1}
    for tier in config["tiers"]:
        tier.pop("bandwidth", None)
    cli.configure(config)
    cli("import", str(tmp_path / "big.pt"), "--as-step", "40")
    assert not list(step.glob("*")), "the next start has removed it"
    assert cli.steps()["40@3"] == {"disk": "committed", "far": "committed"}
