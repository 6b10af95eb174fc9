"""``ls`` and ``show``: everything stored is listed, what could not be read is reported, and nothing is changed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cli_kit import Cli, flip

import tierfall
from tests.steps import state_of
from tierfall.core.types.units import format_size

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def test_metrics_that_are_no_numbers_are_json_all_the_same(make_cli: MakeCli) -> None:
    cli = make_cli()
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), metrics={"a": math.nan, "b": -math.inf, "c": 2.0}, block=True)
    metrics = cli.json("ls")["checkpoints"][0]["metrics"]
    assert metrics == {"a": "nan", "b": "-inf", "c": 2.0}
    assert "-inf" in cli("ls", "-m").out


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
