"""``ls`` and ``show``: everything stored is listed, what could not be read is reported, and nothing is changed."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cli_kit import Cli, flip

import tierfall
from tests.steps import blank, files_below, state_of
from tierfall.core.types.units import format_size

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def two_lines(cli: Cli) -> None:
    """Save 1 to 4, go back to 2, and save 3 again: 4@1 and, where it stays, 3@1 are left behind."""
    with tierfall.open(cli.config) as ckpt:
        for step in range(1, 5):
            tags = ["best"] if step == 2 else []
            ckpt.save(step, state_of(step), metrics={"loss": 1 / step}, tags=tags, block=True)
        ckpt.drain()
    with tierfall.open(cli.config) as ckpt:
        ckpt.restore(blank(), step=2)
        ckpt.save(3, state_of(3), block=True)
        ckpt.pin(2)


def test_ls_shows_every_step_on_every_tier(make_cli: MakeCli) -> None:
    """The far tier survives more than the near one, and has nothing of the new line yet: its old step stays."""
    cli = make_cli(disk={}, far={"shared": True, "flush": {"every": 2}})
    two_lines(cli)
    document = cli.json("ls")
    assert document["owner"] is None
    found = {f"{c['step']}@{c['attempt']}": c for c in document["checkpoints"]}
    assert cli.steps() == {
        "1@1": {"disk": "committed"},
        "2@1": {"disk": "committed", "far": "committed"},
        "3@2": {"disk": "committed"},
        "4@1": {"far": "committed"},
    }
    assert found["2@1"]["tags"] == ["best"]
    assert found["2@1"]["pinned"]
    assert found["2@1"]["metrics"] == {"loss": 0.5}
    assert found["2@1"]["ordinal"] == 2
    assert found["3@2"]["started_from"] == {"step": 2, "attempt": 1}
    assert {name: c["abandoned"] for name, c in found.items()} == {
        **{"1@1": False, "2@1": False, "3@2": False, "4@1": True},
    }
    assert all(c["bytes"] > 80_000 and c["age_s"] >= 0 for c in found.values())
    tiers = {tier["name"]: tier for tier in document["tiers"]}
    assert tiers["disk"]["checkpoints"] == 3
    assert tiers["far"]["place"].endswith("/far")


def test_ls_for_people_has_a_line_for_every_step(make_cli: MakeCli) -> None:
    cli = make_cli(disk={}, far={"shared": True, "flush": {"every": 2}})
    two_lines(cli)
    lines = {w[0]: w for line in cli("ls", "--metrics").out.splitlines() if (w := line.split())}
    assert lines["STEP"] == ["STEP", "AGE", "SIZE", "host", "disk", "far", "loss"]
    assert lines["2@1"][-6:] == ["-", "committed", "committed", "0.5", "#best,", "pinned"]
    assert lines["4@1"][-5:] == ["-", "-", "committed", "0.25", "abandoned"]
    assert lines["run"][:4] == ["run", "run:", "4", "checkpoints"]


def test_an_empty_run_is_no_error(make_cli: MakeCli, tmp_path: Path) -> None:
    cli = make_cli()
    (tmp_path / "disk").mkdir()
    assert cli("ls").out == "run run: no checkpoint on the tiers or in host memory\n"
    assert cli.json("ls")["checkpoints"] == []


def test_a_tier_that_could_not_be_read_is_reported_and_the_others_are_shown(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1])
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    answer = cli("ls", code=1)
    assert "tier far could not be read" in answer.err
    assert "1@1" in answer.out
    document = cli.json("ls", code=1)
    assert not document["ok"]
    assert [tier["name"] for tier in document["tiers"] if tier["error"]] == ["far"]
    assert cli.steps() == {"1@1": {"disk": "committed"}}
    assert not (tmp_path / "far").exists()


def test_a_damaged_commit_record_is_shown_as_damaged(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    flip(tmp_path / "disk" / "run" / "step-00000001-a0001" / "commit.json", 40)
    flip(tmp_path / "disk" / "run" / "step-00000002-a0001" / "commit.json", 40)
    flip(tmp_path / "far" / "run" / "step-00000002-a0001" / "commit.json", 40)
    assert "2@1 is damaged" in cli("ls", code=1).err
    assert cli.steps() == {
        "1@1": {"disk": "damaged", "far": "committed"},
        "2@1": {"disk": "damaged", "far": "damaged"},
    }
    shown = cli.json("show", "2", code=1)
    assert shown["manifests"] == []
    assert {copy["state"] for copy in shown["copies"].values()} == {"damaged"}


def test_what_is_not_committed_is_unfinished_and_no_checkpoint(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli()
    saved(cli, [1])
    run = tmp_path / "disk" / "run"
    shutil.copytree(run / "step-00000001-a0001", run / "step-00000002-a0001")
    (run / "step-00000002-a0001" / "commit.json").unlink()
    document = cli.json("ls")
    assert [c["step"] for c in document["checkpoints"]] == [1]
    assert document["tiers"][1]["unfinished"] == [{"step": 2, "attempt": 1}]
    assert "unfinished" in cli("ls").out


def test_metrics_that_are_no_numbers_are_json_all_the_same(make_cli: MakeCli) -> None:
    cli = make_cli()
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), metrics={"a": math.nan, "b": -math.inf, "c": 2.0}, block=True)
    metrics = cli.json("ls")["checkpoints"][0]["metrics"]
    assert metrics == {"a": "nan", "b": "-inf", "c": 2.0}
    assert "-inf" in cli("ls", "-m").out


def test_looking_changes_nothing(
    make_cli: MakeCli, saved: Saved, tmp_path: Path, memory: Path
) -> None:
    cli = make_cli(disk={"retain": {"last": 1}}, host={"on_close": "keep"})
    saved(cli, [1, 2])
    cli.configure({**cli.config, "max_wait": "5s"})
    before = files_below(tmp_path), files_below(memory)
    for words in (["ls"], ["show", "2"], ["verify"], ["prune", "--dry-run"]):
        cli(*words)
        cli(*words, "--json")
    assert (files_below(tmp_path), files_below(memory)) == before


def test_show_tells_everything_of_one_step(make_cli: MakeCli, make_state: Any) -> None:
    cli = make_cli(
        disk={"retain": {"last": 2}}, far={"flush": {"every": 3}}, host={"on_close": "keep"}
    )
    with tierfall.open(cli.config) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, make_state(step), metrics={"loss": 0.25}, tags=["t"], block=True)
        ckpt.pin(2)
    shown = cli.json("show", "3")
    assert (shown["step"], shown["attempt"], shown["ordinal"], shown["started_from"]) == (
        3,
        1,
        3,
        None,
    )
    assert (shown["metrics"], shown["tags"], shown["owed"]) == ({"loss": 0.25}, ["t"], [])
    assert list(shown["copies"]) == ["host", "disk", "far"]
    reasons = {tier: copy["decision"] for tier, copy in shown["copies"].items()}
    assert reasons["host"]["reason"] == "the newest in memory is always kept"
    assert {decision["verdict"] for decision in reasons.values()} == {"keep"}
    names = ["commit.json", "rank-00000-of-00001.json", "rank-00000-of-00001.safetensors"]
    for tier in ("disk", "far"):
        files = shown["copies"][tier]["files"]
        assert [file["name"] for file in files] == names
        assert sum(file["bytes"] for file in files) == shown["copies"][tier]["bytes"]
    (manifest,) = shown["manifests"]
    assert manifest["image_bytes"] == shown["bytes"] == shown["copies"]["disk"]["files"][2]["bytes"]
    assert manifest["chunks"] >= 2
    weights = {t["name"]: t for t in manifest["tensors"]}
    assert weights["model.0.weight"]["shape"] == [128, 32]
    assert weights["model.0.weight"]["bytes"] == 128 * 32 * 4
    assert sum(t["bytes"] for t in manifest["tensors"]) == manifest["tensor_bytes"]
    assert cli.json("show", "2")["copies"]["disk"]["marks"] == ["pin"]


def test_show_for_people_names_the_largest_tensor_and_the_reasons(
    make_cli: MakeCli, make_state: Any
) -> None:
    cli = make_cli(disk={"retain": {"last": 2}})
    with tierfall.open(cli.config) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, make_state(step), block=True)
        ckpt.pin(2)
    text = cli("show", "2").out
    largest = text.partition("TENSOR")[2].splitlines()[1].split()
    assert largest == ["model.0.weight", "float32", "128x32", "16", "KiB"]
    assert "keep: pinned" in text
    assert "remarks  pinned" in text
    assert "number 2, started from nothing" in text


def test_a_step_has_one_size_and_a_copy_that_of_its_files(
    make_cli: MakeCli, make_state: Any
) -> None:
    cli = make_cli(disk={"compress": {"codec": "zstd"}})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, make_state(1) | {"zeros": torch.zeros(200_000)}, block=True)
    found = cli.json("show", "1")
    image, stored = (format_size(n) for n in (found["bytes"], found["copies"]["disk"]["bytes"]))
    assert image != stored
    text = cli("show", "1").out
    assert f"size     {image}\n" in text
    assert f"rank 0 of 1: an image of {image} in " in text
    assert f"disk  committed  {stored} " in text
    for file in found["copies"]["disk"]["files"]:
        assert re.search(rf"{file['name']} +{format_size(file['bytes'])}\n", text)
    listed = cli("ls").out
    assert re.search(rf"1@1 .* {image}  ", listed)
    assert f"run run: 1 checkpoint (disk {stored})" in listed
    assert re.search(rf"disk +file +1 +{stored} ", cli("watch", "--once").out)


def test_a_step_of_a_line_that_was_left_behind_is_shown_by_its_attempt(make_cli: MakeCli) -> None:
    cli = make_cli(disk={}, far={"shared": True, "flush": {"every": 2}})
    two_lines(cli)
    assert "4@1 (abandoned): name it with its attempt" in cli("show", "4", code=1).err
    assert cli.json("show", "4@1")["abandoned"]
    assert cli.json("show", "3")["attempt"] == 2
    assert cli("show", "3@1", code=1).out == ""


def test_show_falls_back_to_a_good_manifest_and_says_which_is_bad(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1])
    flip(tmp_path / "disk" / "run" / "step-00000001-a0001" / "rank-00000-of-00001.json", 40)
    answer = cli("show", "1", code=1)
    assert "tier disk" in answer.err
    assert "TENSOR" in answer.out


def test_what_is_one_is_reported_in_the_singular(make_cli: MakeCli, saved: Saved) -> None:
    cli = make_cli()
    saved(cli, [1])
    assert "0 of 1 copy dropped" in cli("prune").out
    assert "1 of 1 copy is good" in cli("verify").out
    assert "1 checkpoint (" in cli("ls").out
    text = cli("show", "1").out
    assert "(1 rank)" in text
    assert " chunks of at most 64 KiB, with " in text
    saved(cli, [2])
    assert "0 of 2 copies dropped" in cli("prune").out
    assert "2 of 2 copies are good" in cli("verify").out
    assert "2 checkpoints (" in cli("ls").out


def test_a_step_folder_that_is_a_link_is_reported_by_every_command_that_looks(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    """Somebody moved it to an archive: it is not followed, and not passed over in silence."""
    cli = make_cli(disk={"retain": {"last": 1}})
    saved(cli, [1, 2])
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    folder.rename(tmp_path / "archived")
    folder.symlink_to(tmp_path / "archived")
    output = "tier disk: run/step-00000002-a0001 is a symbolic link"
    listed = cli("ls", code=1)
    assert "2@1" in listed.out
    assert "unreadable" in listed.out
    for words in (["show", "2"], ["verify", "2"], ["rm", "2", "--yes"], ["watch", "--once"]):
        text = cli(*words, code=1).err.replace("holds a damaged file: disk", "")
        assert output.removeprefix("tier disk: ") in text, words
        assert "put the folder itself there" in text, words
    assert "symbolic link" in cli("verify", code=1).err
    assert [tier["error"] for tier in cli.json("ls", code=1)["tiers"]] == [None, None]
    assert files_below(tmp_path / "archived")
    folder.unlink()
    (tmp_path / "archived").rename(folder)
    assert cli.steps() == {"2@1": {"disk": "committed"}}


def test_what_is_damaged_is_reported_with_its_tier_once(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={}, far={})
    saved(cli, [1, 2])
    flip(tmp_path / "disk" / "run" / "step-00000001-a0001" / "commit.json", 40)
    flip(tmp_path / "disk" / "run" / "step-00000002-a0001" / "rank-00000-of-00001.json", 40)
    record, manifest = cli("show", "2", code=1).err.splitlines()
    assert record.startswith("tierfall: 1@1 is damaged on tier disk: run/step-00000001-a0001/")
    assert manifest.startswith("tierfall: tier disk: rank-00000-of-00001.json of 2@1: ")
