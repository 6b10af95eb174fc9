"""``latest``, several STEPs, ``ls --last`` and ``runs``: finding steps and runs without knowing their names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli, Trainer

import tierfall
from tests.steps import blank, state_of

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


# The latest step -------------------------------------------------------------------------------------


def test_latest_is_what_a_restore_would_use(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, [1, 2, 3])
    assert cli("latest").out == "3@1\n"
    assert cli.json("latest") == {
        **{"run": "run", "step": 3, "attempt": 1, "tiers": ["disk"], "ok": True, "problems": []}
    }
    with tierfall.open(cli.config) as ckpt:
        report = ckpt.restore(blank(), step=1)
        assert report is not None
        ckpt.save(2, state_of(2), block=True)
    assert cli("latest").out == "2@2\n", "a later step that the run went back from does not count"
    with tierfall.open(cli.config) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.attempt) == (2, 2)


def test_without_a_step_latest_says_so_and_fails(make_cli: MakeCli, tmp_path: Path) -> None:
    cli = make_cli()
    (tmp_path / "disk").mkdir()
    answer = cli("latest", code=1)
    assert (answer.out, answer.err.count("\n")) == ("", 1)
    assert "run run has no step that can be restored" in answer.err
    for words in (["show", "latest"], ["pin", "latest"], ["rm", "latest"], ["verify", "latest"]):
        assert "has no step that can be restored" in cli(*words, code=1).err


def test_latest_names_a_step_wherever_one_is_taken(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, [1, 2, 3])
    assert cli.json("show", "latest")["step"] == 3
    assert "pinned 3@1 on disk" in cli("pin", "latest").out
    assert "1 of 1 copy is good" in cli("verify", "latest").out
    assert "2@1" in cli("verify", "latest", "--tier", "far").out, "the latest of that tier"
    assert "exported 3@1" in cli("export", "latest", "--to", str(tmp_path / "out")).out
    assert "copied 3@1 from disk to far" in cli("copy", "latest", "--to", "far").out
    cli("unpin", "latest")
    assert "3@1 is the newest step that can be restored" in cli("rm", "latest", code=1).err


def test_latest_is_not_guessed_while_a_tier_cannot_be_read(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    shutil.rmtree(tmp_path / "disk" / "run" / "step-00000002-a0001")
    (tmp_path / "disk" / "run" / "latest").unlink()
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    answer = cli("latest", code=1)
    assert answer.out == "1@1\n"
    assert "tier far could not be read" in answer.err
    for words in (["pin", "latest"], ["show", "latest"], ["rm", "latest", "--yes"]):
        refused = cli(*words, code=1)
        assert refused.out == ""
        assert "far may hold a later step than the others; of the others it is 1@1: name it" in (
            refused.err
        )
    assert cli("verify", "latest", "--tier", "disk").code == 0, "what is asked of one tier is known"


# Several steps ---------------------------------------------------------------------------------------


def test_several_steps_are_one_command(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 9}})
    saved(cli, [1, 2, 3, 4])
    assert cli("pin", "1", "3@1", "1").out == "pinned 1@1 on disk\npinned 3@1 on disk\n"
    pins = {c["step"]: c["pinned"] for c in cli.json("ls")["checkpoints"]}
    assert pins == {1: True, 2: False, 3: True, 4: False}
    document = cli.json("unpin", "1", "3")
    assert [one["step"] for one in document["steps"]] == [1, 3]
    assert all(one["done"] == ["disk"] for one in document["steps"])
    assert [one["step"] for one in cli.json("show", "2", "4")["steps"]] == [2, 4]
    text = cli("show", "2", "4").out
    assert text.count("lineage  number") == 2
    copies = cli.json("verify", "1", "latest")["copies"]
    assert sorted(copy["step"] for copy in copies) == [1, 4]
    copied = cli.json("copy", "1", "2", "--to", "far")["steps"]
    assert [(one["step"], one["already"]) for one in copied] == [(1, False), (2, False)]
    assert cli("rm", "1", "2").out == "deleted 1@1 on disk, far\ndeleted 2@1 on disk, far\n"
    assert sorted(cli.steps()) == ["3@1", "4@1"]


def test_if_one_step_is_not_there_nothing_is_done(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 9}})
    saved(cli, [1, 2])
    before = cli.json("ls")["checkpoints"]
    for words in (["pin"], ["rm"], ["copy", "--to", "far"], ["verify", "--repair"], ["show"]):
        answer = cli(words[0], "1", "7", *words[1:], code=1)
        assert "step 7 is not there" in answer.err
        assert answer.out == ""
    after = cli.json("ls")["checkpoints"]
    assert [c | {"age_s": 0} for c in after] == [c | {"age_s": 0} for c in before]
    assert "expected 400" in cli("pin", "1", "x", code=2).err


def test_deleting_several_asks_about_the_newest_and_names_the_one_that_is_left(
    make_cli: MakeCli, saved: Saved
) -> None:
    cli = make_cli()
    saved(cli, [1, 2, 3])
    answer = cli("rm", "2", "3", code=1)
    assert "3@1 is the newest step that can be restored; the next is 1@1" in answer.err
    cli("pin", "1")
    assert "1@1 is pinned" in cli("rm", "2", "1", code=1).err
    assert sorted(cli.steps()) == ["1@1", "2@1", "3@1"], "nothing was deleted"
    cli("unpin", "1")
    assert "no step is left that can be restored" in cli("rm", "1", "2", "3", "-y", code=1).err
    cli("rm", "1", "2", "3", "-y", "--even-the-last")
    assert cli.steps() == {}


def test_a_copy_that_fails_does_not_stop_the_others(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 9}})
    saved(cli, [1, 2])
    image = tmp_path / "disk" / "run" / "step-00000001-a0001" / "rank-00000-of-00001.safetensors"
    image.write_bytes(bytes(image.stat().st_size))
    answer = cli("copy", "1", "2", "--to", "far", code=1)
    assert "copied 2@1 from disk to far" in answer.out
    assert answer.err.count("\n") == 1
    assert "1@1" in answer.err


def test_beside_a_trainer_several_steps_are_marked(
    make_cli: MakeCli, train: Callable[[Cli], Trainer]
) -> None:
    cli = make_cli()
    trainer = train(cli)
    for step in (1, 2, 3):
        trainer.tell(f"save {step}")
    answer = cli("pin", "1", "2")
    assert answer.out.count("reads the mark after its next commit there") == 2
    trainer.close()
    pins = {c["step"]: c["pinned"] for c in cli.json("ls")["checkpoints"]}
    assert (pins[1], pins[2], pins[3]) == (True, True, False)


# Long lists ------------------------------------------------------------------------------------------


def test_last_lists_the_newest_and_counts_the_others(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    saved(cli, range(1, 6))
    lines = cli("ls", "--last", "2").out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["4@1", "5@1"]
    assert lines[3] == "3 older steps are not shown (--last 2)"
    assert lines[4].startswith("run run: 5 checkpoints")
    assert [c["step"] for c in cli.json("ls", "-n", "2")["checkpoints"]] == [4, 5]
    assert "not shown" not in cli("ls", "--last", "9").out
    assert "1 older step is not shown" in cli("ls", "-n", "4").out
    for wrong in ("0", "-1", "x"):
        assert "--last" in cli("ls", f"--last={wrong}", code=2).err


def test_metrics_are_shown_when_they_are_asked_for(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    saved(cli, [2, 4])
    assert "loss" not in cli("ls").out.partition("\n")[0]
    header, first, *_ = cli("ls", "--metrics").out.splitlines()
    assert (header.split()[-1], first.split()[-1]) == ("loss", "0.5")


def test_a_copy_that_a_tier_is_owed_is_shown_as_owed(
    make_cli: MakeCli, train: Callable[[Cli], Trainer]
) -> None:
    cli = make_cli(disk={}, slow={"bandwidth": "1kB/s"})
    trainer = train(cli)
    for step in (1, 2):
        trainer.tell(f"capture {step}")
    trainer.kill()
    states = {line.split()[0]: line for line in cli("ls").out.splitlines() if "@1" in line}
    assert "owed" in states["2@1"]


# Runs ------------------------------------------------------------------------------------------------


def test_runs_lists_every_run_on_any_tier(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 2}}, host={"on_close": "keep"})
    saved(cli, [1, 2])
    first = cli.config
    cli.configure({**first, "run": "other"})
    saved(cli, [7])
    cli.configure({**first, "run": "third"})
    (tmp_path / "disk" / "notes").mkdir()
    (tmp_path / "disk" / "readme.txt").write_text("no run")
    (memory / "empty").mkdir()
    found = {one["run"]: one for one in cli.json("runs")["runs"]}
    assert sorted(found) == ["other", "run"]
    assert (found["run"]["checkpoints"], found["run"]["step"], found["run"]["attempt"]) == (2, 2, 1)
    assert found["run"]["tiers"] == ["host", "disk", "far"]
    assert found["other"]["step"] == 7
    assert found["other"]["owner"] is None
    lines = cli("runs").out.splitlines()
    assert lines[0].split() == ["RUN", "STEPS", "LATEST", "AGE", "SIZE", "TIERS"]
    assert lines[1].split()[:3] == ["other", "1", "7@1"]
    assert lines[3] == "2 runs"
    assert (
        "no checkpoint on the tiers or in host memory; the tiers have the runs other, run"
        in cli("ls").out
    )
    assert "the tiers have the runs other, run" in cli("latest", code=1).err


def test_no_run_is_no_error_and_a_run_that_trains_is_named(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli()
    (tmp_path / "disk").mkdir()
    assert cli("runs").out == "no run\n"
    trainer = train(cli)
    trainer.tell("save 1")
    assert "a trainer owns it" in cli("runs").out
    assert cli.json("runs")["runs"][0]["owner"]["pid"] == trainer.pid


def test_a_tier_that_cannot_be_read_is_named_once_and_the_others_are_listed(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1])
    cli.configure({**cli.config, "run": "other"})
    saved(cli, [2])
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    answer = cli("runs", code=1)
    assert [line.split()[0] for line in answer.out.splitlines()[1:3]] == ["other", "run"]
    assert answer.err.count("tier far could not be read") == 1


def test_runs_are_found_in_an_object_store_too(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    store = {"name": "store", "kind": "object", "url": "memory://runs/checkpoints"}
    cli.configure({**cli.config, "tiers": [cli.config["tiers"][0], store]})
    saved(cli, [1, 2])
    assert [(one["run"], one["tiers"]) for one in cli.json("runs")["runs"]] == [("run", ["store"])]


@pytest.mark.parametrize("words", [["latest"], ["runs"], ["ls"]], ids=" ".join)
def test_looking_changes_nothing(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, words: list[str]
) -> None:
    cli = make_cli()
    saved(cli, [1])
    before = sorted(path for path in tmp_path.rglob("*"))
    cli(*words)
    assert sorted(path for path in tmp_path.rglob("*")) == before
