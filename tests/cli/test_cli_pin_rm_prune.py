"""``pin``, ``unpin``, ``rm`` and ``prune`` without a trainer: completed, or the rest is reported per tier."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli

import tierfall
from tests.steps import steps_on
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


def test_a_run_of_another_node_is_warned_about(
    make_cli: MakeCli, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    assert cli("pin", "1").err == ""
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    for words in (["pin", "1"], ["prune"]):
        assert "whether its trainer is alive" in cli(*words).err
