"""``--config``: ``./tiers.yaml`` is its default; a folder or an address in its place is read, and never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli, run
from typer.testing import CliRunner

import tierfall
from tests.steps import files_below, state_of
from tierfall.cli import app

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def test_the_file_in_the_working_folder_is_the_default(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(make_cli(), [1])
    monkeypatch.chdir(tmp_path)
    assert run(["latest"]).out == "1@1\n"
    assert run(["pin", "1"]).out == "pinned 1@1 on disk\n"
    (tmp_path / "tiers.yaml").rename(tmp_path / "other.yaml")
    missing = run(["latest"])
    assert (missing.code, missing.out) == (2, "")
    assert "there is no tiers.yaml here; name a YAML file by --config" in missing.err
    assert "TIERFALL_CONFIG" in missing.err
    (tmp_path / "tiers.yaml").write_text("run: another\ntiers: ./another\n")
    named = {"TIERFALL_CONFIG": str(tmp_path / "other.yaml")}
    assert CliRunner().invoke(app, ["latest"], env=named).output == "1@1\n", "the variable first"


@pytest.mark.parametrize("place", ["disk", "disk/run", "file://{}/disk"])
def test_a_folder_and_an_address_are_read(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(make_cli(), [1, 2])
    words = ["--config", place.format(tmp_path)]
    before = files_below(tmp_path)
    assert run(["latest", *words]).out == "2@1\n"
    for command in (["ls"], ["show", "2"], ["watch", "--once"], ["verify"], ["runs"]):
        answer = run([*command, *words])
        assert (answer.code, answer.err) == (0, ""), command
        assert ("step     2" if command[0] == "show" else "2@1") in answer.out
    changing = (
        ["pin", "1"],
        ["unpin", "1"],
        ["rm", "1"],
        ["rm", "--run", "run", "--all"],
        ["prune"],
        ["forget", "disk"],
        ["drain"],
        ["copy", "1", "--to", "disk"],
        ["import", "x", "--as-step", "9"],
        ["verify", "--repair"],
        ["check"],
    )
    for command in changing:
        answer = run([*command, *words])
        assert (answer.code, answer.out) == (2, ""), command
        assert "a folder or an address is only read" in answer.err
        assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before


def test_of_several_runs_one_is_named(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> None:
    cli = make_cli()
    saved(cli, [1])
    with tierfall.open(cli.config, run="other") as ckpt:
        ckpt.save(7, state_of(7), block=True)
    place = ["--config", str(tmp_path / "disk")]
    assert "has the runs other, run: name one by --run" in run(["ls", *place]).err
    assert run(["latest", *place, "--run", "other"]).out == "7@1\n"
    planned = run(["prune", "--dry-run", *place, "--run", "other"]).out
    assert "no rule applies: name the YAML file with the rules by --config" in planned
    assert {"other", "run"} <= set(run(["runs", *place]).out.split())
    for folder, hint in (
        (tmp_path, f"did you mean {tmp_path}/tiers.yaml?"),
        (cli.folder / "x", ""),
    ):
        folder.mkdir(exist_ok=True)
        answer = run(["ls", "--config", str(folder)])
        assert answer.code == 2
        assert answer.err.strip().endswith(f"has no run{'; ' + hint if hint else ''}")
