"""``verify``, ``verify --repair``, ``check`` and ``init``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import tierfall
from tests.contract.kit import (
    IMAGE,
    MANIFEST,
    Answer,
    Place,
    files_below,
    flip,
    folder_of,
    state_of,
    tierfall_command,
)
from tests.contract.trainer import save


@pytest.fixture
def copies(place: Place) -> Place:
    """Steps 1 and 2 on ``disk`` and ``far``, of two chunks and a header each."""
    place.config(disk={}, far={})
    save(place, 1, 2)
    return place


def damage(place: Place, *words: str) -> list[dict[str, Any]]:
    """What ``verify`` finds; the lines for people have the same files and advice."""
    answer = place.cli("verify", *words, "--json", code=1)
    found: list[dict[str, Any]] = answer.document["damage"]
    assert found
    for one in found:
        assert one["file"] in answer.err
        assert one["advice"] in answer.err
    return found


# verify ------------------------------------------------------------------------------------------------


def test_verify_reads_every_chunk_of_every_copy(copies: Place) -> None:
    document = copies.json("verify")
    assert [(c["step"], c["tier"], c["good"], c["chunks"]) for c in document["copies"]] == [
        *((step, "disk", True, 3) for step in (1, 2)),
        *((step, "far", True, 3) for step in (1, 2)),
    ]
    assert document["bytes"] == sum(image.stat().st_size for image in copies.root.rglob(IMAGE))
    assert (document["damage"], document["unread"], document["notes"]) == ([], [], [])
    only = copies.json("verify", "2", "--tier", "far")["copies"]
    assert [(c["step"], c["tier"]) for c in only] == [(2, "far")]


def test_one_flipped_bit_is_found_in_every_kind_of_file_and_the_advice_mends_it(
    place: Place,
) -> None:
    """A step for each."""
    place.config(disk={}, far={})
    flipped = (
        *(("commit.json", 40, None), ("commit.json", -2, None), (MANIFEST, 40, None)),
        *((IMAGE, 20, 0), (IMAGE, 66_000, 1), (IMAGE, -1, 2)),
    )
    save(place, *range(1, len(flipped) + 1))
    before = files_below(place.root)
    for step, (file, offset, _) in enumerate(flipped, 1):
        flip(folder_of(place, step) / file, offset)
    found = sorted(damage(place), key=lambda one: int(one["step"]))
    lines = place.cli("verify", code=1).err
    for step, (one, (file, _, chunk)) in enumerate(zip(found, flipped, strict=True), 1):
        assert (one["tier"], one["step"], one["attempt"]) == ("disk", step, 1)
        assert (one["file"], one["chunk"]) == (file, chunk)
        assert one["advice"] in lines
        command = one["advice"].rpartition(": tierfall ")[2]
        assert command == f"verify --config {place.yaml} {step}@1 --tier disk --repair"
        place.cli(*command.replace(f" --config {place.yaml}", "").split())
        mended = files_below(folder_of(place, step))
        there = f"disk/run/{folder_of(place, step).name}"
        assert all(mended[name] == before[f"{there}/{name}"] for name in (file, IMAGE, MANIFEST))
    assert {n: d for n, d in files_below(place.root).items() if n in before} == before
    assert place.json("verify")["ok"]


def test_records_of_attempts_and_latest_are_checked_and_mended(copies: Place) -> None:
    run = copies.root / "disk" / "run"
    before = files_below(run)
    flip(run / "attempts" / "a0001.json", 40)
    (run / "latest").write_text("step-00000009-a0001\n")
    files = {one["file"].rpartition("/")[2] for one in damage(copies)}
    assert files == {"a0001.json", "latest"}
    copies.cli("verify", "--repair")
    assert {name: d for name, d in files_below(run).items() if name in before} == before


def test_damage_in_every_copy_is_past_repair_and_changes_nothing(copies: Place) -> None:
    for tier in ("disk", "far"):
        flip(folder_of(copies, 1, tier) / IMAGE, -1)
    assert [one["tier"] for one in damage(copies)] == ["disk", "far"]
    before = {image: image.read_bytes() for image in copies.root.rglob(IMAGE)}
    document = copies.json("verify", "--repair", code=1)
    assert [one["done"] for one in document["repairs"]] in ([], [False, False])
    assert {image: image.read_bytes() for image in copies.root.rglob(IMAGE)} == before


def test_two_copies_that_are_damaged_in_different_places_mend_each_other(copies: Place) -> None:
    before = {image: image.read_bytes() for image in copies.root.rglob(IMAGE)}
    flip(folder_of(copies, 1) / IMAGE, 70_000)
    flip(folder_of(copies, 1, "far") / IMAGE, -1)
    assert [one["done"] for one in copies.json("verify", "--repair")["repairs"]] == [True, True]
    assert {image: image.read_bytes() for image in copies.root.rglob(IMAGE)} == before


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_a_packed_copy_is_checked_and_mended_packed(place: Place, codec: str) -> None:
    """Each file of it, in a step of its own, and all of them in one."""
    place.config(disk={"compress": {"codec": codec}}, far={})
    save(place, *range(1, 7))
    for step in range(1, 6):
        folder = folder_of(place, step)
        (image,) = folder.glob(f"{IMAGE}.*")
        stored = folder / MANIFEST.replace(".json", ".stored.json")
        files = [image, stored, folder / MANIFEST, folder / "commit.json"]
        for path in files if step == 5 else [files[step - 1]]:
            flip(path, path.stat().st_size // 2)
    before = files_below(place.root / "far"), files_below(folder_of(place, 6))
    assert {(one["tier"], one["step"]) for one in damage(place)} == {
        ("disk", step) for step in range(1, 6)
    }
    repairs = place.json("verify", "--repair")["repairs"]
    assert sorted((one["step"], one["done"], one["why"]) for one in repairs) == [
        (step, True, "rewritten from far") for step in range(1, 6)
    ]
    document = place.json("verify")
    assert (document["ok"], document["notes"]) == (True, [])
    assert len(list(place.root.glob(f"disk/run/step-*/{image.name}"))) == 6
    assert place.steps("disk") == list(range(1, 7))
    assert (files_below(place.root / "far"), files_below(folder_of(place, 6))) == before


def test_what_verify_found_is_known_from_then_on_until_it_is_mended(copies: Place) -> None:
    """``ls`` compares names and lengths alone."""
    flip(folder_of(copies, 2) / IMAGE, -1)
    assert copies.ls()["2@1"] == {"disk": "committed", "far": "committed"}
    copies.cli("verify", code=1)
    assert copies.ls()["2@1"] == {"disk": "damaged", "far": "committed"}
    copies.config(disk={"retain": {"last": 1}}, far={})
    dropped = [d for d in copies.json("prune")["decisions"] if d["dropped"]]
    assert dropped == [], "a damaged copy is no reason to delete a good one"
    copies.cli("verify", "--repair")
    assert copies.ls()["2@1"] == {"disk": "committed", "far": "committed"}


def test_files_of_others_and_unfinished_copies_are_noted_and_are_no_damage(copies: Place) -> None:
    (folder_of(copies, 1) / "notes.txt").write_text("mine")
    shutil.copytree(folder_of(copies, 2), folder_of(copies, 9))
    (folder_of(copies, 9) / "commit.json").unlink()
    document = copies.json("verify")
    assert document["damage"] == []
    assert any("notes.txt" in note for note in document["notes"])
    assert (folder_of(copies, 1) / "notes.txt").read_text() == "mine"


def test_no_deletion_is_advised_while_an_unread_tier_may_hold_a_good_copy(copies: Place) -> None:
    flip(folder_of(copies, 1) / IMAGE, -1)
    shutil.move(copies.root / "far", copies.root / "unmounted")
    (found,) = damage(copies)
    assert "far" in found["advice"]
    assert "tierfall rm" not in found["advice"]
    assert "far" in str(copies.json("verify", code=1)["unread"])


def test_a_bit_of_an_image_in_host_memory_is_found(place: Place) -> None:
    place.config(host={"on_close": "keep"}, disk={"flush": {"every": 2}})
    with place.open() as ckpt:
        ckpt.save(1, state_of(1)).captured()
    assert place.json("verify")["copies"][0]["tier"] == "host"
    (memory,) = (
        path
        for path in place.memory.rglob("*")
        if path.is_file() and state_of(1)["w"].numpy().tobytes()[:4096] in path.read_bytes()
    )
    flip(memory, memory.read_bytes().index(state_of(1)["w"].numpy().tobytes()[:4096]) + 100)
    (found,) = damage(place)
    assert (found["tier"], found["step"]) == ("host", 1)


# check -------------------------------------------------------------------------------------------------


def test_check_measures_every_tier_and_leaves_nothing(place: Place) -> None:
    place.config(disk={}, far={"capacity": "1GiB"})
    save(place, 1)
    before = files_below(place.root)
    document = place.json("check", "--size", "300KiB")
    assert (document["ok"], document["size_bytes"]) == (True, 300 << 10)
    tiers = {tier["name"]: tier for tier in document["tiers"]}
    for name in ("disk", "far"):
        tier = tiers[name]
        assert tier["write_bytes_per_second"] > 1000
        assert tier["read_bytes_per_second"] > 1000
        assert 0 < tier["round_trip_s"] < 10
        assert (tier["durable"], tier["fenced"], tier["error"]) == (True, True, None)
        assert tier["free_bytes"] > 0
        assert tier["place"] == str(place.root / name)
    assert tiers["far"]["capacity_bytes"] == 1 << 30
    assert (tiers["host"]["write_bytes_per_second"], tiers["host"]["error"]) == (None, None)
    assert files_below(place.root) == before
    text = place.cli("check", "--size", "64KiB").out
    assert "if the process dies: 1@1 is left, on disk" in text


def test_check_names_a_tier_that_refuses_and_a_file_in_its_place(place: Place) -> None:
    place.config(disk={}, far={})
    save(place, 1)
    shutil.rmtree(place.root / "far")
    (place.root / "far").write_text("no folder")
    document = place.json("check", "--size", "64KiB", code=1)
    assert [tier["name"] for tier in document["tiers"] if tier["error"]] == ["far"]
    assert any("far" in problem for problem in document["problems"])


def test_check_fills_no_capacity(place: Place) -> None:
    place.config(disk={"capacity": "200KiB"})
    save(place, 1)
    answer = place.cli("check", "--size", "1MiB", code=-1)
    assert "disk" in answer.out + answer.err
    assert "nothing" in answer.out + answer.err
    assert place.steps() == [1]


# init --------------------------------------------------------------------------------------------------


def init(place: Place, *words: str, code: int = 0) -> Answer:
    answer = tierfall_command("init", *words, cwd=place.root)
    assert answer.code == code, answer.out + answer.err
    return answer


def test_init_asks_nothing_without_a_terminal_and_writes_a_file_that_works(place: Place) -> None:
    answer = init(place, "--disk", "fast", "--far", "far", "--parameters", "1M", "--every", "50")
    assert "next: tierfall check" in answer.out
    written = yaml.safe_load(place.yaml.read_text())
    names = {tier["name"]: tier for tier in written["tiers"]}
    assert list(names) == ["host", "disk", "far"]
    assert names["far"]["shared"]
    assert names["far"]["flush"]["every"] > 1
    assert written["interval"]["every"] == 50
    written["tiers"][0]["folder"] = str(place.memory)
    place.write(written)
    with place.open() as ckpt:
        ckpt.save(50, state_of(50), block=True)
    assert place.restored().step == 50


def test_init_replaces_a_file_only_by_force(place: Place) -> None:
    place.yaml.write_text("mine")
    assert "--force" in init(place, "--yes", code=2).err
    assert place.yaml.read_text() == "mine"
    init(place, "--yes", "--force", "--run", "gpt")
    assert tierfall.Config.model_validate(yaml.safe_load(place.yaml.read_text())).run == "gpt"


def test_an_answer_that_does_not_fit_is_named_and_nothing_is_written(place: Place) -> None:
    for words in (
        *(["--every", "often"], ["--parameters", "7G"], ["--parameters", "7"]),
        *(["--disk", "s3://x/y"], ["--disk", "a,b"], ["--run", "a/b"]),
    ):
        assert words[0].lstrip("-") in init(place, *words, code=2).err
        assert not place.yaml.exists()


def test_init_creates_no_folder_whose_parent_is_missing(place: Place) -> None:
    missing = place.root / "mnt" / "lustre"
    answer = init(place, "--far", str(missing / "checkpoints"), "--parameters", "1M")
    assert f"note: {missing} does not exist" in answer.out
    assert not (place.root / "mnt").exists()


def test_init_prints_its_figures_as_json(place: Place, tmp_path: Path) -> None:
    found = init(place, str(tmp_path / "t.yaml"), "--json", "--parameters", "1M", "--ranks", "2")
    assert found.document["ok"]
    assert found.document["image_bytes"] == 7_000_000
    assert found.document["check"].endswith("--ranks 2")
    assert (tmp_path / "t.yaml").exists()


def test_what_is_advised_about_another_run_than_that_of_the_file_names_it(place: Place) -> None:
    """Obeyed as it is printed, it acts on no other run."""
    place.config()
    save(place, 1)
    first = files_below(place.root)
    place.config(run="two")
    save(place, 1)
    flip(place.root / "disk" / "two" / folder_of(place, 1).name / IMAGE, -1)
    place.config()
    advice = place.cli("verify", "--run", "two", code=1).err
    assert f"tierfall rm --config {place.yaml} --run two 1@1" in advice
    place.cli("rm", "--run", "two", "1@1", "--yes", "--even-the-last")
    assert files_below(place.root / "disk" / "run") == {
        name.removeprefix("disk/run/"): data
        for name, data in first.items()
        if name.startswith("disk/run/")
    }
    assert "the tiers have the runs" in place.cli("verify", "--run", "tow", code=1).err
