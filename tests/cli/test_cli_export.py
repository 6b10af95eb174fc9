"""``export`` and ``copy``: their output, in words and as a document, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

from tests.contract.kit import flip
from tests.contract.trainer import Trainer
from tierfall.cli import commands

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
IMAGE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved) -> Cli:
    """Steps 1 and 2 on disk, and step 2 on far."""
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, [1, 2])
    return cli


# export ----------------------------------------------------------------------------------------------


def test_an_export_reads_from_the_tier_that_is_named(cli: Cli, tmp_path: Path) -> None:
    flip(tmp_path / "far/run/step-00000002-a0001" / IMAGE, -1)
    words = ("export", "2", "--to", str(tmp_path / "out"))
    assert "damaged in every copy" in cli(*words, "--tier", "far", code=1).err
    flip(tmp_path / "disk/run/step-00000002-a0001" / IMAGE, 70_000)
    document = cli.json(*words)
    assert set(document["sources"]) == {"disk", "far"}
    assert "on disk" in document["fallbacks"][0]["what"]
    assert "skipped: chunk 1 of 2@1 on disk" in cli(*words, "--force").out
    assert "step 1 is not there" in cli(*words[:1], "1", *words[2:], "--tier", "far", code=1).err
    assert "no tier is named 'nvme'" in cli(*words, "--tier", "nvme", code=2).err


@pytest.mark.parametrize("gone", [("commit.json", IMAGE), (IMAGE,)])
def test_a_step_that_is_dropped_while_it_is_exported_is_not_called_damaged(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...]
) -> None:
    """The commit record is the first to go. An image that is missing beside it is damage."""
    real = commands.export_checkpoint

    def drop_first(*words: Any) -> Any:
        for name in gone:
            (tmp_path / "disk/run/step-00000001-a0001" / name).unlink()
        return real(*words)

    monkeypatch.setattr(commands, "export_checkpoint", drop_first)
    err = cli("export", "1", "--to", str(tmp_path / "out"), code=1).err
    if len(gone) == 2:
        assert err == "tierfall: export: 1@1 was deleted while it was read\n"
    else:
        assert "damaged in every copy" in err


def test_beside_a_trainer_a_step_in_its_memory_is_exported(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli(disk={"flush": {"every": 2}})
    trainer = train(cli)
    trainer.tell("capture 1")
    document = cli.json("export", "1", "--to", str(tmp_path / "out"))
    assert list(document["sources"]) == ["host"]
