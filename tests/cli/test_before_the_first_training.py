"""Before the first training: a path that no run has used is not created yet, which is no error; one that was used, and
is missing, could not be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from cli_kit import Cli

import tierfall
from tests.steps import state_of

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
NEW = "disk: {}/disk is not created yet: the first training creates it"


def test_ls_and_check_say_so_and_create_nothing(make_cli: MakeCli, tmp_path: Path) -> None:
    cli = make_cli()
    for words in (["ls"], ["check", "--size", "64KiB"]):
        answer = cli(*words)
        assert NEW.format(tmp_path) in answer.out
        assert answer.err == ""
    (_, disk) = cli.json("ls")["tiers"]
    assert (disk["not_created"], disk["error"]) == (True, None)
    assert disk["place"] == str(tmp_path / "disk")
    assert not (tmp_path / "disk").exists()


def test_nothing_is_to_do_then_and_nothing_is_created(make_cli: MakeCli, tmp_path: Path) -> None:
    cli = make_cli(disk={}, far={})
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ["runs"],
        ["verify"],
        ["prune", "--dry-run"],
        ["prune"],
        ["drain"],
        ["drain", "--deadline", "5s"],
    ):
        assert cli(*words).err == ""
    for command in ("pin", "rm"):
        assert "step 1 is not there" in cli(command, "1", code=1).err
    answer = cli("forget", "disk")
    assert "disk is not created yet" in answer.out
    assert sorted(tmp_path.rglob("*")) == before
    assert not list(Path(cli.config["tiers"][0]["folder"]).iterdir()), "host memory neither"


def test_a_folder_that_no_training_creates_could_not_be_read(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """A tier that is only read, and a shared one whose file system is not mounted."""
    cli = make_cli(disk={})
    saved(cli, [1])
    more = {"archive": {"read_only": True}, "lustre/ckpt": {"shared": True}}
    for (place, words), name in zip(more.items(), ("archive", "lustre"), strict=True):
        tier = {"name": name, "kind": "file", "path": str(tmp_path / place), **words}
        cli.configure({**cli.config, "tiers": [*make_cli(disk={}).config["tiers"], tier]})
        for command in ("ls", "latest", "check"):
            answer = cli(command, code=1)
            assert "not created yet" not in answer.out
            assert name in answer.err


def test_forget_creates_no_folder_of_a_tier(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1])
    cli.configure(make_cli(disk={}, far={}, new={}).config)
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    assert "far is forgotten by disk" in cli("forget", "far").out
    assert not (tmp_path / "far").exists()
    assert not (tmp_path / "new").exists()


def test_a_tier_that_was_lost_while_the_run_trained_could_not_be_read(
    make_cli: MakeCli, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, host={"on_close": "keep"}, max_wait="1s")
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        shutil.move(tmp_path / "disk", tmp_path / "lost")
    answer = cli("ls", code=1)
    assert "tier disk could not be read" in answer.err
    assert "not created yet" not in answer.out


def test_runs_names_a_tier_that_a_run_of_this_machine_remembers(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli()
    saved(cli, [1])
    shutil.move(tmp_path / "disk", tmp_path / "unmounted")
    assert "tier disk could not be read" in cli("runs", code=1).err


def test_a_tier_that_is_new_in_the_file_is_not_created_yet(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={})
    saved(cli, [1])
    cli.configure(make_cli(disk={}, far={}).config)
    answer = cli("ls")
    assert "far: " in answer.out
    assert "is not created yet" in answer.out
    assert cli("latest").out == "1@1\n"
    assert "a folder is missing (tier far" in cli("pin", "1", code=1).err, "a change needs all"


def test_an_import_into_a_new_run_creates_the_folder(make_cli: MakeCli, tmp_path: Path) -> None:
    cli = make_cli(disk={}, far={})
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    answer = cli("import", str(tmp_path / "x.pt"), "--as-step", "5")
    assert "disk: it was not created yet; the import has created it" in answer.out
    assert cli.steps() == {"5@1": {"disk": "committed", "far": "committed"}}
    assert "created" not in cli("import", str(tmp_path / "x.pt"), "--as-step", "6").out


def test_a_tier_that_was_used_and_is_missing_could_not_be_read(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1])
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    for words in (
        ["ls"],
        ["check", "--size", "64KiB"],
        ["import", str(tmp_path / "x.pt"), "--as-step", "5"],
    ):
        answer = cli(*words, code=1)
        assert "far" in answer.err
        assert "not created yet" not in answer.out
    assert not (tmp_path / "far").exists()
