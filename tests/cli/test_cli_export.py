"""``export`` and ``copy``: their output, in words and as a document, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cli_kit import Cli, Trainer, flip

import tierfall
from tests.steps import files_below, state_of, steps_on
from tierfall.cli import copy_export

ALONE = "ignore:torch.distributed is disabled"
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


def test_an_export_says_what_it_wrote(cli: Cli, tmp_path: Path) -> None:
    answer = cli("export", "1", "--to", str(tmp_path / "out"))
    path = tmp_path / "out" / "run-step-00000001.safetensors"
    assert answer.out.startswith(f"exported 1@1 from disk to {path}: ")
    document = cli.json("export", "2@1", "--to", str(tmp_path / "out"), "--only", "w")
    assert (document["step"], document["attempt"], document["tensors"]) == (2, 1, 1)
    assert document["path"] == str(tmp_path / "out" / "w.safetensors")
    assert document["bytes"] == Path(document["path"]).stat().st_size
    assert list(document["sources"]) == ["disk"]
    opened = safetensors.torch.load_file(document["path"])
    assert torch.equal(opened["w"], state_of(2)["w"])


def test_several_parts_are_named_by_several_options(cli: Cli, tmp_path: Path) -> None:
    words = ("--only", "w", "--only", "extra", "--format", "torch")
    document = cli.json("export", "1", "--to", str(tmp_path / "out"), *words)
    assert torch.load(document["path"], weights_only=True)["extra"] == {"step": 1}
    assert document["notes"] == []


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
    real = copy_export.export_checkpoint

    def drop_first(*words: Any) -> Any:
        for name in gone:
            (tmp_path / "disk/run/step-00000001-a0001" / name).unlink()
        return real(*words)

    monkeypatch.setattr(copy_export, "export_checkpoint", drop_first)
    err = cli("export", "1", "--to", str(tmp_path / "out"), code=1).err
    if len(gone) == 2:
        assert err == "tierfall: export: 1@1 was deleted while it was read\n"
    else:
        assert "damaged in every copy" in err


def test_an_export_changes_nothing_on_the_tiers(cli: Cli, tmp_path: Path, memory: Path) -> None:
    before = files_below(tmp_path / "disk"), files_below(tmp_path / "far"), files_below(memory)
    cli("export", "2", "--to", str(tmp_path / "out"), "--format", "torch")
    after = files_below(tmp_path / "disk"), files_below(tmp_path / "far"), files_below(memory)
    assert after == before


def test_beside_a_trainer_a_step_in_its_memory_is_exported(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli(disk={"flush": {"every": 2}})
    trainer = train(cli)
    trainer.tell("capture 1")
    document = cli.json("export", "1", "--to", str(tmp_path / "out"))
    assert list(document["sources"]) == ["host"]


# copy ------------------------------------------------------------------------------------------------


def test_a_copy_says_what_it_did_and_why(cli: Cli, tmp_path: Path) -> None:
    cli("pin", "1")
    answer = cli("copy", "1", "--to", "far")
    assert answer.out.splitlines()[0].startswith(
        "copied 1@1 from disk to far, which did not hold it ("
    )
    assert "marks copied from other tiers: pin\n" in answer.out
    assert steps_on(tmp_path / "far") == [1, 2]
    again = cli("copy", "1", "--to", "far")
    assert again.out.startswith("far holds 1@1 already, and it is good (")
    document = cli.json("copy", "1", "--to", "far")
    assert (document["already"], document["marks"], document["tier"]) == (True, [], "far")


def test_a_copy_beyond_the_rules_lives_on_through_the_next_start(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 1000}, "retain": {"last": 1}})
    saved(cli, [1, 2])
    cli("copy", "1", "--to", "far")
    text = cli("copy", "2", "--to", "far").out
    assert "delete it again" not in text, "the newest stays"
    assert "note: beside 2@1, the rules of far delete 1@1 after the next commit" in text
    saved(cli, [3])
    assert 2 in steps_on(tmp_path / "far")


def test_both_show_progress_to_whoever_watches(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("export", "1", "--to", str(tmp_path / "out")), ("copy", "1", "--to", "far")):
        messages: list[tuple[int, int]] = []
        base: Any = copy_export.ProgressBar

        class Seen(base):  # type: ignore[misc]
            def set(self, done: int, total: int) -> None:
                messages.append((done, total))  # noqa: B023 - used within this round

        monkeypatch.setattr(copy_export, "ProgressBar", Seen)
        cli(*words)
        assert messages[-1][0] == messages[-1][1] > 80_000


def test_a_checkpoint_of_an_unreadable_tier_is_not_called_absent(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for words in (["export", "1", "--to", str(tmp_path / "out")], ["copy", "1", "--to", "far"]):
        answer = cli(*words, code=1)
        assert "may be on disk" in answer.err
    assert tierfall.load(cli.config, step=2)["extra"] == {"step": 2}
    answer = cli("export", "2", "--to", str(tmp_path / "out"), code=1)
    assert answer.out.startswith("exported 2@1 from far to ")
    assert answer.err.startswith("tierfall: tier disk could not be read: ")
