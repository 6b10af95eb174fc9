"""``pin``, ``unpin``, ``rm`` and ``prune`` without a trainer: completed, or the rest is reported per tier."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, flip

import tierfall
from tests.steps import blank, files_below, state_of, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.config import load_config
from tierfall.core.format.catalog import merge
from tierfall.core.scheduler.ledger.tasks import CommandKind
from tierfall.core.types.errors import AccessDeniedError
from tierfall.ops import commands
from tierfall.ops.reader import RunReader

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def pinned(cli: Cli) -> list[int]:
    return [c["step"] for c in cli.json("ls")["checkpoints"] if c["pinned"]]


def refuse_deletions(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let one tier refuse every deletion."""
    delete = PosixBackend.delete

    def refuse(self: PosixBackend, key: str) -> None:
        if self.place == str(root):
            raise AccessDeniedError(f"delete {key!r} in {self.place}: read-only file system")
        delete(self, key)

    monkeypatch.setattr(PosixBackend, "delete", refuse)


# pin and unpin ---------------------------------------------------------------------------------------


def test_a_pin_protects_on_every_tier_until_it_is_taken_away(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, range(1, 4))
    assert cli("pin", "1").out == "pinned 1@1 on disk, far\n"
    assert cli.json("pin", "1@1")["done"] == ["disk", "far"]
    assert pinned(cli) == [1]
    cli.configure(make_cli(disk={"retain": {"last": 1}}, far={"retain": {"last": 1}}).config)
    cli("prune")
    assert (steps_on(tmp_path / "disk"), steps_on(tmp_path / "far")) == ([1, 3], [1, 3])
    assert cli("unpin", "1").out == "unpinned 1@1 on disk, far\n"
    assert pinned(cli) == []
    cli("prune")
    assert (steps_on(tmp_path / "disk"), steps_on(tmp_path / "far")) == ([3], [3])


def test_a_pin_and_an_unpin_reach_into_memory(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli(disk={}, host={"on_close": "keep"})
    saved(cli, [1])
    assert cli.json("pin", "1")["done"] == ["host", "disk"]
    assert cli.json("show", "1")["copies"]["host"]["marks"] == ["pin"]
    with tierfall.open(cli.config) as ckpt:
        assert [c.pinned for c in ckpt.checkpoints()] == [True]
    assert cli.json("unpin", "1")["done"] == ["host", "disk"]
    shown = cli.json("show", "1")["copies"]
    assert [copy["marks"] for copy in shown.values()] == [[], []]
    assert list(shown) == ["host", "disk"], "memory was kept"


def test_a_tier_that_could_not_be_asked_is_named_and_the_others_are_done(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, range(1, 3))
    cli("pin", "1")
    refuse_deletions(monkeypatch, tmp_path / "far")
    answer = cli("unpin", "1", code=1)
    assert answer.out == "unpinned 1@1 on disk\n"
    assert "unpin 1@1: tier far: " in answer.err
    assert "read-only file system" in answer.err
    document = cli.json("unpin", "1", code=1)
    assert list(document["failed"]) == ["far"]


def test_a_pin_that_comes_too_late_claims_nothing(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """Between the look and the mark the trainer dropped the copy: no mark may stay behind without it."""
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    config = load_config(cli.config)
    with RunReader(config) as reader:
        checkpoint = commands.find(merge(reader.list()), 1, None, doing="pin")
    shutil.rmtree(tmp_path / "disk" / "run" / "step-00000001-a0001")
    carried = commands.set_mark_on_tiers(config, CommandKind.PIN, checkpoint)
    assert carried.done == ("far",)
    assert "was deleted from disk just now" in str(carried.failed["disk"])
    assert not (tmp_path / "disk" / "run" / "step-00000001-a0001").exists()


# rm --------------------------------------------------------------------------------------------------


def test_rm_takes_a_step_from_every_tier_and_from_memory(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(disk={}, far={}, host={"on_close": "keep"})
    saved(cli, [1, 2])
    assert cli("rm", "1").out == "deleted 1@1 on host, disk, far\n"
    assert cli.steps() == {"2@1": {"host": "sealed", "disk": "committed", "far": "committed"}}
    assert not list(tmp_path.glob("*/run/step-00000001-*"))
    cli("rm", "2@1", "--yes", "--even-the-last")
    assert cli.steps() == {}
    assert not list(memory.rglob("*.arena")), "memory without an image is given back"
    assert cli("drain").out == "run run: nothing is in host memory\n"


def test_rm_leaves_files_of_others_alone(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    mine = tmp_path / "disk" / "run" / "step-00000001-a0001" / "notes.txt"
    mine.write_text("mine")
    cli("rm", "1")
    assert [path.name for path in mine.parent.iterdir()] == ["notes.txt"]


def test_a_pinned_step_is_not_deleted(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    cli("pin", "1")
    before = files_below(tmp_path)
    assert "tierfall unpin 1@1" in cli("rm", "1", "--yes", code=1).err
    assert files_below(tmp_path) == before


def test_the_newest_step_is_deleted_only_on_demand(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    before = files_below(tmp_path)
    answer = cli("rm", "2", code=1)
    assert "newest step that can be restored; the next is 1@1" in answer.err
    assert "--yes" in answer.err
    assert files_below(tmp_path) == before
    assert cli("rm", "2", "--yes").out == "deleted 2@1 on disk\n"
    assert (tmp_path / "disk" / "run" / "latest").read_text() == "step-00000001-a0001\n"
    assert "no step is left" in cli("rm", "1", code=1).err


@pytest.mark.parametrize(("typed", "left"), [("y", [1]), ("n", [1, 2]), ("", [1, 2])])
def test_a_person_at_a_terminal_is_asked(
    make_cli: MakeCli,
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    left: list[int],
) -> None:
    from tierfall.cli import commands

    cli = make_cli()
    saved(cli, [1, 2])
    monkeypatch.setattr(commands, "at_terminal", lambda: True)
    answer = cli("rm", "2", input=typed + "\n", code=0 if typed == "y" else 1)
    assert "Delete it?" in answer.out
    assert steps_on(tmp_path / "disk") == left


def test_an_older_step_is_deleted_by_a_newest_that_is_damaged(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """What counts as the newest is what a restore would take."""
    cli = make_cli()
    saved(cli, [1, 2])
    flip(tmp_path / "disk" / "run" / "step-00000002-a0001" / "commit.json", 40)
    assert "no step is left that can be restored" in cli("rm", "1", code=1).err
    assert cli("rm", "2").out == "deleted 2@1 on disk\n"
    assert cli.steps() == {"1@1": {"disk": "committed"}}


def test_what_is_left_of_a_deletion_is_reported_per_tier(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    with monkeypatch.context() as patch:
        refuse_deletions(patch, tmp_path / "far")
        answer = cli("rm", "1", code=1)
    assert answer.out == "deleted 1@1 on disk\n"
    assert "rm 1@1: tier far: " in answer.err
    assert cli.steps()["1@1"] == {"far": "committed"}
    assert cli.json("ls")["checkpoints"][0]["deleted"], "the next start finishes it"
    with tierfall.open(cli.config):
        pass
    assert steps_on(tmp_path / "far") == [2]


def test_a_tier_that_is_away_keeps_its_copy_and_that_is_reported(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    shutil.rmtree(tmp_path / "far")
    (tmp_path / "far").write_text("not a folder")
    answer = cli("rm", "1", code=1)
    assert "far" in answer.err
    assert "1@1" in cli("ls", code=1).out, "nothing was done where a tier refuses to be opened"


# prune -----------------------------------------------------------------------------------------------


def drops(document: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [
        (d["tier"], d["step"], d["reason"]) for d in document["decisions"] if d["verdict"] == "drop"
    ]


def test_prune_does_what_the_dry_run_reported(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 2}})
    saved(cli, range(1, 7))
    cli("pin", "2")
    cli.configure(
        make_cli(
            disk={"retain": {"last": 2}}, far={"flush": {"every": 2}, "retain": {"last": 1}}
        ).config
    )
    before = files_below(tmp_path)
    planned = cli.json("prune", "--dry-run")
    assert planned["dry_run"]
    assert drops(planned) == [
        *(("disk", step, "no rule keeps it (last 2)") for step in (1, 3, 4)),
        ("far", 4, "no rule keeps it (last 1)"),
    ]
    assert all(d["bytes"] > 80_000 and not d["dropped"] for d in planned["decisions"])
    assert files_below(tmp_path) == before
    text = cli("prune", "--dry-run").out
    assert "drop  no rule keeps it (last 2)" in text
    assert "keep  pinned" in text
    assert "4 of 9 copies would be dropped" in text
    done = cli.json("prune")
    assert drops(done) == drops(planned)
    assert {d["step"] for d in done["decisions"] if d["dropped"]} == {1, 3, 4}
    assert (steps_on(tmp_path / "disk"), steps_on(tmp_path / "far")) == ([2, 5, 6], [2, 6])
    assert cli("prune").out.endswith("0 of 5 copies dropped, 0 B\n")


def test_prune_takes_no_attempt_flushes_nothing_and_collects_nothing(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """A trainer on another node may be at work on a shared tier: what looks unfinished there may be its own."""
    cli = make_cli(disk={})
    saved(cli, range(1, 4))
    run = tmp_path / "disk" / "run"
    shutil.copytree(run / "step-00000003-a0001", run / "step-00000009-a0002")
    (run / "step-00000009-a0002" / "commit.json").unlink()
    (run / "step-00000009-a0002" / unfinished_name()).write_text("half")
    cli.configure(make_cli(disk={"retain": {"last": 1}}, far={"flush": {"every": 3}}).config)
    (tmp_path / "far").mkdir()
    for words in (["prune"], ["pin", "3"], ["unpin", "3"]):
        cli(*words)
    assert steps_on(tmp_path / "disk") == [3]
    assert [path.name for path in (run / "attempts").iterdir()] == ["a0001.json"]
    assert len(list((run / "step-00000009-a0002").iterdir())) == 3
    assert list((tmp_path / "far").iterdir()) == [], (
        "far is owed a copy, and gets it from a trainer"
    )


def test_a_copy_that_another_tier_waits_for_is_not_pruned(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """A person pins nothing here: far is owed step 2 and could get it from nowhere else."""
    cli = make_cli(disk={})
    saved(cli, range(1, 4))
    cli.configure(make_cli(disk={"retain": {"last": 1}}, far={"flush": {"every": 2}}).config)
    (tmp_path / "far").mkdir()
    planned = cli.json("prune", "--dry-run")
    reasons = {d["step"]: d["reason"] for d in planned["decisions"]}
    assert "far is still owed" in reasons[2]
    cli("prune")
    assert steps_on(tmp_path / "disk") == [2, 3]


def test_what_could_not_be_dropped_is_reported(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, range(1, 4))
    cli.configure(make_cli(disk={"retain": {"last": 1}}).config)
    refuse_deletions(monkeypatch, tmp_path / "disk")
    answer = cli("prune", code=1)
    assert "prune: 1@1 is still on disk" in answer.err
    assert "0 of 3 copies dropped" in answer.out


def test_a_tier_that_could_not_be_read_is_left_out_of_the_plan_and_reported(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={"retain": {"last": 5}}, far={"retain": {"last": 5}})
    saved(cli, range(1, 4))
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    document = cli.json("prune", "--dry-run", code=1)
    assert {d["tier"] for d in document["decisions"]} == {"disk"}
    assert "tier far could not be read" in document["problems"][0]


def test_a_run_of_another_node_is_warned_about(
    make_cli: MakeCli, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    assert cli("pin", "1").err == ""
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    for words in (["pin", "1"], ["prune"]):
        assert "whether its trainer is alive" in cli(*words).err


def test_after_an_order_the_run_goes_on(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    cli("rm", "2", "--yes")
    with tierfall.open(cli.config) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert report.step == 1
        ckpt.save(2, state_of(2), block=True)
    assert cli.steps() == {"1@1": {"disk": "committed"}, "2@2": {"disk": "committed"}}
