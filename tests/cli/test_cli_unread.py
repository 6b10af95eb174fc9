"""Every command names a tier that could not be read, and never takes it for an empty one; what is deleted meanwhile is
not called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli

import tierfall
from tests.contract.kit import IMAGE, flip
from tests.contract.trainer import Trainer
from tests.steps import files_below, state_of
from tierfall.backends.posix.backend import PosixBackend
from tierfall.cli import commands
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import AccessDeniedError

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
Train = Callable[[Cli], Trainer]
Silence = Callable[[Path], None]


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    """``silence(root)``: keep a tier from answering."""
    scan = PosixBackend.scan
    denied: set[str] = set()

    def refuse(self: PosixBackend, prefix: str) -> Iterator[StoredObject]:
        if self.place in denied:
            raise AccessDeniedError(f"list {prefix!r} in {self.place}: is not there for you")
        return scan(self, prefix)

    monkeypatch.setattr(PosixBackend, "scan", refuse)
    return lambda root: denied.add(str(root))


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> Cli:
    """Steps 1 and 2 on both tiers, step 3 on the far one alone."""
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2, 3])
    run = tmp_path / "disk" / "run"
    shutil.rmtree(run / "step-00000003-a0001")
    (run / "latest").write_text("step-00000002-a0001\n")
    return cli


# What export and copy take ---------------------------------------------------------------------------


@pytest.fixture
def gone_back(make_cli: MakeCli) -> Cli:
    """Step 2 of attempt 1 on both tiers, and of attempt 2, which went back to step 1, on disk alone, as far as any tier
    tells."""
    cli = make_cli(disk={}, far={"flush": {"every": 2}}, third={"flush": {"every": 1000}})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(state_of(0), step=1)
        ckpt.pin(2, attempt=1)
        ckpt.save(2, state_of(2), block=True)
        ckpt.drain()
    run = cli.folder / "far" / "run"
    shutil.rmtree(run / "step-00000002-a0002")
    (run / "latest").write_text("step-00000002-a0001\n")
    (lineage,) = (run / "lineage").glob("a0002-*")
    lineage.rename(cli.folder / lineage.name)
    return cli


@pytest.mark.parametrize(
    "words", [["export", "{}", "--to", "OUT"], ["copy", "{}", "--to", "third"]], ids=" ".join
)
def test_no_step_of_an_older_line_is_taken_while_a_newer_one_may_lie_on_an_unread_tier(
    gone_back: Cli, tmp_path: Path, silence: Silence, words: list[str]
) -> None:
    def named(step: str) -> list[str]:
        return [word.replace("{}", step).replace("OUT", str(tmp_path / "out")) for word in words]

    silence(tmp_path / "disk")
    before = files_below(tmp_path)
    unread, refused = gone_back(*named("2"), code=1).err.splitlines()
    assert "tier disk could not be read: " in unread
    assert "may have saved step 2 too, on disk: if 2@1 is meant, name it 2@1" in refused
    assert files_below(tmp_path) == before
    document = gone_back.json(*named("2@1"), code=1)
    assert (document["step"], document["attempt"]) == (2, 1)
    (problem,) = document["problems"]
    assert problem.startswith("tier disk could not be read: ")
    if words[0] == "export":
        gone_back(*named("2"), "--tier", "far", "--force")


def test_what_is_damaged_where_it_was_read_may_be_good_where_it_was_not(
    cli: Cli, tmp_path: Path, silence: Silence
) -> None:
    image = tmp_path / "disk/run/step-00000002-a0001" / IMAGE
    flip(image, -1)
    silence(tmp_path / "far")
    unread, damaged = cli("export", "2", "--to", str(tmp_path / "out"), code=1).err.splitlines()
    assert unread.startswith("tierfall: tier far could not be read: ")
    assert "damaged in every copy" in damaged
    assert damaged.endswith("; far could not be read and may hold a good copy")
    assert cli("export", "2", "--to", str(image), code=2).err.count("\n") == 2, "other refusals too"


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
    words = ("export", "1", "--tier", "disk", "--to", str(tmp_path / "out"))
    err = cli(*words, code=1).err
    if len(gone) == 2:
        assert err == "tierfall: export: 1@1 was deleted while it was read\n"
    else:
        assert "damaged in every copy" in err


# Folders that are not there --------------------------------------------------------------------------


def test_an_order_makes_no_folder_that_is_not_there(cli: Cli, tmp_path: Path, memory: Path) -> None:
    """What was made would from then on look like a tier that holds nothing."""
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    shutil.rmtree(memory / "run", ignore_errors=True)
    before = files_below(tmp_path)
    for words in (["prune"], ["pin", "2"], ["unpin", "2"], ["rm", "1"]):
        answer = cli(*words, code=1)
        assert answer.out == ""
        assert f"a folder is missing (tier far: {tmp_path / 'far'})" in answer.err
        assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before
    assert not (tmp_path / "far").exists()
    assert list(memory.iterdir()) == []


def test_beside_a_trainer_an_order_makes_no_folder_either(
    make_cli: MakeCli, train: Train, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    trainer = train(cli)
    trainer.tell("save 1")
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    for command in ("pin", "unpin"):
        answer = cli(command, "1", code=1)
        assert answer.out.startswith(f"{command}ned 1@1 on disk: the trainer")
        assert f"{command} 1@1: tier far: " in answer.err
        assert not (tmp_path / "far").exists()
