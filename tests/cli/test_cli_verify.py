"""``verify``: damage is found and named with its remedy, and a good copy is never called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, folder, save_on_two_nodes

import tierfall
from tests.contract.kit import IMAGE, flip
from tests.contract.trainer import Trainer
from tests.steps import state_of, wait_until
from tierfall.tiers.image_file import IMAGE_START

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def damage(cli: Cli, *words: str) -> list[dict[str, Any]]:
    """What ``verify`` finds damaged; the text for people names the same files."""
    document = cli.json("verify", *words, code=1)
    found: list[dict[str, Any]] = document["damage"]
    text = cli("verify", *words, code=1).err
    assert found
    for one in found:
        assert one["file"] in text
        assert one["advice"] in text
    return found


@pytest.fixture
def cli(make_cli: MakeCli, saved: Saved) -> Cli:
    """Two steps on two tiers, two chunks and a header each."""
    cli = make_cli(disk={}, far={})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
    return cli


def test_a_record_that_was_moved_here_from_another_step_is_found(cli: Cli, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    shutil.copy(folder(disk, 2) / "commit.json", folder(disk, 1) / "commit.json")
    (found,) = damage(cli)
    assert (found["file"], found["step"]) == ("commit.json", 1)
    assert "2@1" in found["problem"]


def test_two_whole_copies_of_one_step_that_differ_are_found(
    cli: Cli, make_cli: MakeCli, tmp_path: Path
) -> None:
    """Another life of the run, by the same name and number, was put together with this one."""
    other = make_cli(other={})
    with tierfall.open(other.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    shutil.rmtree(folder(tmp_path / "far"))
    shutil.copytree(folder(tmp_path / "other"), folder(tmp_path / "far"))
    cli = Cli(tmp_path, cli.config)
    (found,) = damage(cli)
    assert (found["tier"], found["step"]) == ("far", 1)
    assert "another checkpoint than that on disk" in found["problem"]


def test_copies_of_which_a_node_has_its_own_part_are_good(tmp_path: Path) -> None:
    config = save_on_two_nodes(tmp_path)
    document = Cli(tmp_path, config).json("verify")
    assert {copy["tier"] for copy in document["copies"]} == {"host", "nvme", "pfs"}
    assert document["damage"] == []


# Memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(make_cli: MakeCli) -> Cli:
    """A step whose image stays in memory."""
    cli = make_cli(disk={}, host={"on_close": "keep"})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    return cli


def image_in(memory: Path) -> Path:
    return next((memory / "run").glob("*/slot-0.*.image"))


def record_offset(memory: Path, start: bytes) -> int:
    """Where a record of that kind begins after the image."""
    return image_in(memory).read_bytes().index(start, IMAGE_START + 70_000)


def test_damage_that_hides_an_image_in_memory_is_found(kept: Cli, memory: Path) -> None:
    places = {
        "manifest": record_offset(memory, b'{"format":1') + 40,
        "commit record": record_offset(memory, b'"wall_time_s"') + 20,
        "header": 100,
    }
    for what, place in places.items():
        flip(image_in(memory), place)
        (found,) = damage(kept)
        assert (found["tier"], found["step"]) == ("host", None), what
        assert found["problem"], what
        flip(image_in(memory), place)


def test_beside_a_trainer_that_saves_nothing_good_is_called_damaged(
    make_cli: MakeCli, train: Callable[[Cli], Trainer]
) -> None:
    """Steps come and go on the tier and in memory, which has room for a few images, while they are read."""
    cli = make_cli(disk={"retain": {"last": 2}}, host={"capacity": "384KiB"})
    trainer = train(cli)
    trainer.tell("save 1")
    assert trainer.tell("loop") == "looping"
    seen: set[tuple[int, str]] = set()
    looks = 0
    while looks < 4 or len({step for step, _ in seen}) < 4:  # until enough has come and gone
        document = cli.json("verify")
        assert document["damage"] == []
        seen |= {(c["step"], c["tier"]) for c in document["copies"]}
        looks += 1
    assert {tier for _, tier in seen} == {"host", "disk"}


# What was found is known later -----------------------------------------------------------------------


def test_a_living_trainer_learns_of_it_before_it_drops_because_of_that_copy(
    make_cli: MakeCli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli = make_cli(disk={"retain": {"last": 2}})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        flip(folder(tmp_path / "disk", 2) / IMAGE, 66_000)
        damage(cli)
        ckpt.save(3, state_of(3), block=True)
        learnt = "disk: 2@1 is damaged, and no longer counts as a copy"
        wait_until(lambda: learnt in caplog.text, "the trainer has read the list of the tier")
        assert "--tier disk --repair' rewrites it" in caplog.text
        assert (folder(tmp_path / "disk", 1) / "commit.json").exists()
        ckpt.save(4, state_of(4), block=True)
        old = [folder(tmp_path / "disk", step) for step in (1, 2)]
        gone = lambda: not any((path / "commit.json").exists() for path in old)  # noqa: E731
        wait_until(gone, "two newer ones are good")
    cli("verify")
