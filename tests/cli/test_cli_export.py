"""``export`` and ``copy``: their output, in words and as a document, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from cli_kit import Cli, Trainer, flip, run_process

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


def test_an_export_refuses_what_is_there(cli: Cli, tmp_path: Path) -> None:
    words = ("export", "1", "--to", str(tmp_path / "out"))
    cli(*words)
    before = files_below(tmp_path)
    answer = cli(*words, code=1)
    assert "exists already: --force replaces it" in answer.err
    assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before
    cli(*words, "--force")
    assert files_below(tmp_path) == before


def test_an_export_changes_nothing_on_the_tiers(cli: Cli, tmp_path: Path, memory: Path) -> None:
    before = files_below(tmp_path / "disk"), files_below(tmp_path / "far"), files_below(memory)
    cli("export", "2", "--to", str(tmp_path / "out"), "--format", "torch")
    after = files_below(tmp_path / "disk"), files_below(tmp_path / "far"), files_below(memory)
    assert after == before


@pytest.mark.filterwarnings(ALONE)
def test_dcp_is_a_folder_at_the_place_that_is_named(cli: Cli, tmp_path: Path) -> None:
    words = ("export", "1", "--to", str(tmp_path / "out"), "--format", "dcp")
    document = cli.json(*words, "--only", "w")
    assert document["path"] == str(tmp_path / "out")
    state = {"w": torch.zeros_like(state_of(1)["w"])}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["w"], state_of(1)["w"])
    assert "is there already" in cli(*words, "--force", code=1).err
    assert "'xyz'" in cli("export", "1", "--to", "out", "--format", "xyz", code=2).err


def test_shards_of_another_dtype_with_a_file_beside_them(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["export", "2", "--to", str(tmp_path / "out"), "--only", "w", "--dtype", "bf16"]
    more = ["--max-shard", "10KB", "--with", str(tmp_path / "config.json")]
    document = cli.json(*words, *more)
    assert document["path"] == str(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "w.safetensors"}
    opened = safetensors.torch.load_file(tmp_path / "out/w.safetensors")
    assert torch.equal(opened["w"], state_of(2)["w"].to(torch.bfloat16))
    before = files_below(tmp_path)
    assert "is there already" in cli(*words, *more, "--force", code=1).err
    for wrong in (["--max-shard", "many"], ["--dtype", "int4"], ["--with", "nothing.json"]):
        answer = cli(*words, *wrong, code=2)
        assert wrong[0] in answer.err
        assert answer.err.count("\n") == 1
    assert files_below(tmp_path) == before


def test_beside_a_trainer_a_step_in_its_memory_is_exported(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli(disk={"flush": {"every": 2}})
    trainer = train(cli)
    trainer.tell("capture 1")
    document = cli.json("export", "1", "--to", str(tmp_path / "out"))
    assert list(document["sources"]) == ["host"]


def test_a_process_exports_as_the_function_does(cli: Cli, tmp_path: Path) -> None:
    answer = run_process("export", "1", "--to", str(tmp_path / "out"), "--config", str(cli.path))
    assert (answer.code, answer.err) == (0, "")


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


def test_a_copy_is_a_document_too(cli: Cli) -> None:
    document = cli.json("copy", "1", "--to", "far")
    assert (document["step"], document["already"], list(document["sources"])) == (
        1,
        False,
        ["disk"],
    )
    assert document["bytes"] > 80_000


def test_memory_and_unknown_tiers_are_no_target(cli: Cli) -> None:
    assert "is memory" in cli("copy", "1", "--to", "host", code=2).err
    assert "no tier is named 'nvme'" in cli("copy", "1", "--to", "nvme", code=2).err


def test_a_copy_is_left_to_a_trainer_that_lives(
    make_cli: MakeCli, train: Callable[[Cli], Trainer], tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={"flush": {"every": 1000}})
    trainer = train(cli)
    trainer.tell("save 1")
    before = files_below(tmp_path)
    answer = cli("copy", "1", "--to", "far", code=1)
    assert f"copy: a trainer owns run 'run' (process {trainer.pid} on " in answer.err
    assert "nothing was copied" in answer.err
    assert (answer.out, answer.err.count("\n")) == ("", 1)
    answer = cli("verify", "--repair", code=1)
    assert f"verify --repair: a trainer owns run 'run' (process {trainer.pid} on " in answer.err
    assert files_below(tmp_path) == before
    trainer.close()
    cli("copy", "1", "--to", "far")
    assert steps_on(tmp_path / "far") == [1]


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
