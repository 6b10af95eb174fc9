"""``tierfall rm --run NAME --all``: a run is deleted on all tiers, in memory and from what tiers remember, and only if
its name is typed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli, Trainer

import tierfall
from tests import forked
from tests.steps import blank, files_below, state_of, step_in

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
ALL = ("rm", "--run", "run", "--all")


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> Cli:
    """The run ``run`` on two tiers and in memory, beside another run, with files of a person in its folders."""
    made = make_cli(disk={}, far={"shared": True}, host={"on_close": "keep"})
    saved(made, [1, 2])
    with tierfall.open(made.config, run="other") as ckpt:
        ckpt.save(7, state_of(7), block=True)
    made("pin", "1")
    for name in ("notes.txt", "step-00000001-a0001/my notes.txt", "attempts/readme"):
        (tmp_path / "disk" / "run" / name).write_text("mine")
    (tmp_path / "disk" / "run" / "link").symlink_to(tmp_path / "far")
    return made


def test_it_goes_from_every_tier_and_what_is_not_tierfalls_stays(
    cli: Cli, tmp_path: Path, memory: Path
) -> None:
    other = {name: data for name, data in files_below(tmp_path).items() if "/other/" in name}
    answer = cli(*ALL, input="run\n")
    assert "disk: 2 checkpoints" in answer.out
    assert "host: 2 checkpoints" in answer.out
    assert "deleted run run on host, disk, far" in answer.out
    assert answer.out.count("tierfall did not write it") == 4
    assert "run/step-00000001-a0001/my notes.txt stays" in answer.out
    left = {name for name in files_below(tmp_path) if "/run/" in name}
    assert left == {
        "disk/run/notes.txt",
        "disk/run/step-00000001-a0001/my notes.txt",
        "disk/run/attempts/readme",
    }
    assert (tmp_path / "disk" / "run" / "link").is_symlink()
    assert not (tmp_path / "far" / "run").exists()
    assert {name: d for name, d in files_below(tmp_path).items() if "/other/" in name} == other
    assert not list((memory / "run").rglob("*.arena"))
    assert not list((memory / "run").rglob("*.json")), "nothing is remembered of the tiers"
    assert {r["run"]: r["checkpoints"] for r in cli.json("runs")["runs"]} == {"other": 1, "run": 0}
    with tierfall.open(cli.config) as ckpt:
        assert ckpt.restore(blank()) is None, "it is a new run"
        ckpt.save(1, state_of(1), block=True)
    assert [int(id.partition("@")[0]) for id in cli.steps()] == [1]


@pytest.mark.parametrize("typed", ["", "\n", "yes\n", "Run\n", " run\n", "other\n", None])
def test_any_other_line_deletes_nothing(cli: Cli, tmp_path: Path, typed: str | None) -> None:
    before = files_below(tmp_path)
    answer = cli(*ALL, "--yes", input=typed, code=1)
    assert "nothing was deleted" in answer.err
    assert files_below(tmp_path) == before


def test_the_document_has_what_was_deleted_and_what_stays(cli: Cli) -> None:
    document = json.loads(cli(*ALL, "--json", input="run\n").out)
    assert document["deleted"] == ["host", "disk", "far"]
    assert sorted(document["kept"]["disk"]) == [
        "attempts/readme",
        "link",
        "notes.txt",
        "step-00000001-a0001/my notes.txt",
    ]
    assert document["kept"].keys() == {"disk"}
    assert "no tier has a file of run" in cli(*ALL, input="run\n", code=1).err


def test_it_is_refused_beside_a_trainer_and_if_a_tier_cannot_be_read(
    cli: Cli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    trainer = train(cli)
    before = files_below(tmp_path / "disk")
    assert "a trainer owns run 'run'" in cli(*ALL, input="run\n", code=1).err
    trainer.close()
    assert files_below(tmp_path / "disk").keys() >= before.keys()
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    before = files_below(tmp_path)
    refused = cli(*ALL, input="run\n", code=1)
    assert "tier far could not be read" in refused.err
    assert "nothing was deleted" in refused.err
    assert files_below(tmp_path) == before
    with tierfall.open({**cli.config, "tiers": cli.config["tiers"][:2]}) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2


def test_what_was_saved_or_pinned_after_the_run_was_shown_is_not_deleted(
    cli: Cli, saved: Saved, tmp_path: Path
) -> None:
    """The name is typed late: one may have saved, and pinned, meanwhile."""
    words = ["-m", "tierfall", *ALL, "--config", str(cli.path)]
    error = tmp_path / "error.txt"
    for change, expected in (
        (lambda: saved(cli, [3]), "nothing was deleted, since 3@2 on "),
        (lambda: cli("pin", "2"), "nothing was deleted, since 2@1 on "),
        (lambda: cli("unpin", "2"), ""),
    ):
        with (
            error.open("w") as stderr,
            forked.Forked(
                forked.server_of(), words, os.environ, stderr, has_stdin=True
            ) as deletion,
        ):
            while "type the name" not in (line := str(deletion.stdout.readline())):
                assert line != "b''", error.read_text()
            change()
            before = files_below(tmp_path / "disk")
            assert deletion.stdin is not None
            deletion.stdin.write("run\n")
        assert expected in error.read_text()
        if expected:
            assert files_below(tmp_path / "disk").items() >= before.items()
    assert "run run: no checkpoint" in cli("ls").out


def test_a_second_machine_that_trained_the_run_is_told_how_to_delete_it_there(
    cli: Cli, tmp_path: Path
) -> None:
    host, _, far = cli.config["tiers"]
    there = {**host, "folder": str(tmp_path / "memory there")}
    cli.configure({**cli.config, "tiers": [host, far]})
    other = {**cli.config, "tiers": [there, far]}
    with tierfall.open(other) as ckpt:
        ckpt.restore(blank())
        ckpt.save(9, state_of(9), block=True)
    cli(*ALL, input="run\n")
    cli.configure(other)
    assert "repeat it after 'tierfall forget TIER'" in cli(*ALL, input="run\n", code=1).err
    cli("forget", "far")
    assert "deleted run run on host, far" in cli(*ALL, input="run\n").out
    with tierfall.open(other) as ckpt:
        assert ckpt.restore(blank()) is None


@pytest.mark.parametrize("words", [["--all"], ["--all", "--run", "run", "1"], []])
def test_a_run_is_named_and_no_step(cli: Cli, words: list[str]) -> None:
    assert "tierfall: rm: " in cli("rm", *words, input="run\n", code=2).err


def test_a_tier_that_is_only_read_is_named_and_keeps_its_files(cli: Cli, tmp_path: Path) -> None:
    host, disk, far = cli.config["tiers"]
    far = {**{k: far[k] for k in ("name", "kind", "path", "shared")}, "read_only": True}
    cli.configure({**cli.config, "tiers": [host, disk, far]})
    before = files_below(tmp_path / "far")
    answer = cli(*ALL, input="run\n", code=1)
    assert "deleted run run on host, disk" in answer.out
    assert "rm: tier far: " in answer.err
    assert files_below(tmp_path / "far") == before
