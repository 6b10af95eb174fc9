"""``pin``, ``unpin``, ``rm``, ``prune`` and ``drain`` without a trainer: done, or what is left is reported per tier."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Cli

import tierfall
from tests.memory_store import MemoryStore
from tests.steps import state_of, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.cli import commands
from tierfall.core.types.errors import AccessDeniedError

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def refuse_deletions(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let one tier refuse every deletion."""
    delete = PosixBackend.delete

    def refuse(self: PosixBackend, key: str) -> None:
        if self.place == str(root):
            raise AccessDeniedError(f"delete {key!r} in {self.place}: read-only file system")
        delete(self, key)

    monkeypatch.setattr(PosixBackend, "delete", refuse)


# rm --------------------------------------------------------------------------------------------------


def test_a_person_at_a_terminal_is_asked(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    monkeypatch.setattr(commands, "at_terminal", lambda: True)
    for typed, left in (("n", [1, 2]), ("", [1, 2]), ("y", [1])):
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
    assert steps_on(tmp_path / "far") == [], "far is owed a copy, and gets it from a trainer"


def test_a_run_of_another_node_is_warned_about(
    make_cli: MakeCli, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = make_cli()
    saved(cli, [1, 2])
    assert cli("pin", "1").err == ""
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    for words in (["pin", "1"], ["prune"]):
        assert "whether its trainer is alive" in cli(*words).err


# drain -----------------------------------------------------------------------------------------------


def test_a_tier_that_refuses_is_tried_until_the_deadline(
    make_cli: MakeCli, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(monkeypatch)
    cli = make_cli(max_wait="0.3s")
    cli.configure({**cli.config, "tiers": [cli.config["tiers"][0], store.tier()]})
    store.refuse = lambda call, key: PermissionError() if "step-00000002" in key else None
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2))
    assert store.steps() == [1]
    store.heal_after_refusals(5)
    cli("drain", "--deadline", "60s")
    assert store.steps() == [1, 2]
