"""``verify``: damage is found and named with its remedy, and a good copy is never called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Trainer, flip, save_on_two_nodes

import tierfall
from tests.steps import blank, files_below, state_of, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.verify import CheckedCopy, CopyVerifier
from tierfall.core.format.records import parse_commit
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId
from tierfall.ops.findings import contradictions
from tierfall.tiers.arena.layout import BLOCK_BYTES, EXTENTS_START, PAGE_BYTES
from tierfall.tiers.stored import StoredTier

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]
IMAGE = "rank-00000-of-00001.safetensors"
MANIFEST = "rank-00000-of-00001.json"


def folder(root: Path, step: int = 1) -> Path:
    return root / "run" / f"step-{step:08d}-a0001"


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
    """Two pinned steps on two tiers, two chunks and a header each."""
    cli = make_cli(disk={}, far={})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
            ckpt.pin(step)
    return cli


@pytest.mark.parametrize(
    ("file", "offset", "chunk"),
    [
        ("commit.json", 40, None),
        ("commit.json", -2, None),
        (MANIFEST, 40, None),
        (IMAGE, 20, 0),
        (IMAGE, 66_000, 1),
        (IMAGE, -1, 2),
        ("marks/pin", 30, None),
    ],
)
def test_one_flipped_bit_is_found_in_every_kind_of_file(
    cli: Cli, tmp_path: Path, file: str, offset: int, chunk: int | None
) -> None:
    flip(folder(tmp_path / "disk") / file, offset)
    (found,) = damage(cli)
    assert (found["tier"], found["step"], found["attempt"]) == ("disk", 1, 1)
    assert (found["file"], found["chunk"]) == (file, chunk)
    good = {(c["step"], c["tier"]): c["good"] for c in cli.json("verify", code=1)["copies"]}
    assert good == {(1, "disk"): False, (2, "disk"): True, (1, "far"): True, (2, "far"): True}


def test_no_deletion_is_advised_while_a_tier_that_may_hold_a_good_copy_is_unread(
    cli: Cli, tmp_path: Path
) -> None:
    flip(folder(tmp_path / "disk") / IMAGE, -1)
    shutil.move(tmp_path / "far", tmp_path / "unmounted")
    for words in ([], ["1"], ["--tier", "disk"], ["1", "--tier", "disk"]):
        (found,) = damage(cli, *words)
        assert "far could not be read and may hold one" in found["advice"]
    answer = cli("verify", "--repair", code=1)
    assert "damaged in every copy" in answer.err
    assert "; far could not be read and may hold a good copy\n" in answer.err
    assert "tierfall rm" not in answer.err
    shutil.move(tmp_path / "unmounted", tmp_path / "far")
    cli("verify", "--repair")


def test_no_deletion_is_advised_while_another_copy_could_not_be_read(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(folder(tmp_path / "disk") / IMAGE, -1)
    real = StoredTier.read_into

    def fail(self: StoredTier, *words: Any, **more: Any) -> None:
        if self.name == "far":
            raise UnreachableError("gone")
        real(self, *words, **more)

    monkeypatch.setattr(StoredTier, "read_into", fail)
    (found,) = damage(cli)
    assert "far could not be read and may hold one" in found["advice"]


def test_a_longer_image_is_found_even_where_the_commit_record_is_damaged(
    cli: Cli, tmp_path: Path
) -> None:
    far = folder(tmp_path / "far")
    flip(far / "commit.json", 40)
    flip(far / IMAGE, 66_000)
    (far / IMAGE).write_bytes((far / IMAGE).read_bytes() + b"x")
    found = {(one["file"], one["chunk"]) for one in damage(cli)}
    assert found == {("commit.json", None), (IMAGE, None), (IMAGE, 1)}


def test_a_record_that_was_moved_here_from_another_step_is_found(cli: Cli, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    for file in ("commit.json", "marks/pin"):
        shutil.copy(folder(disk, 2) / file, folder(disk, 1) / file)
    found = {one["file"]: one["problem"] for one in damage(cli)}
    assert set(found) == {"commit.json", "marks/pin"}
    assert "2@1" in found["marks/pin"]


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


def test_a_copy_is_compared_with_each_part_of_its_checkpoint(tmp_path: Path) -> None:
    """That of the first tier is of other ranks: it proves nothing."""
    save_on_two_nodes(tmp_path)
    parts = [folder(tmp_path / node / "nvme") / "commit.json" for node in ("a", "b")]
    one, two = (parse_commit(part.read_bytes(), what=part.name) for part in parts)
    forged = replace(two, files=tuple(replace(file, bytes=file.bytes + 1) for file in two.files))
    copies = [
        CheckedCopy(id=CheckpointId(1, 1), tier=tier, commit=commit)
        for tier, commit in (("host", one), ("nvme", two), ("pfs", forged))
    ]
    assert [finding.tier for finding in contradictions(copies)] == ["pfs"]
    assert "than that on nvme" in contradictions(copies)[0].problem


@pytest.mark.parametrize("when", ["files", "read_manifest", "read_into"])
def test_a_copy_that_is_dropped_meanwhile_is_not_called_damaged(
    cli: Cli, tmp_path: Path, when: str
) -> None:
    """A drop takes the commit record first: here, while the verifier is at work."""
    backend = PosixBackend(tmp_path / "disk")
    store = StoredTier(name="disk", run="run", backend=backend)
    look = getattr(store, when)

    def drop_first(id: CheckpointId, *words: Any, **more: Any) -> Any:
        found = look(id, *words, **more) if when == "files" else None
        store.remove_mark(id, "pin")
        store.delete(id, attempt=None)
        return found or look(id, *words, **more)

    setattr(store, when, drop_first)
    with CopyVerifier() as verifier:
        found = verifier.check_stored(store, CheckpointId(1, 1))
    store.close()
    assert (found.gone, found.error, found.damage, found.good) == (True, None, (), False)


# Memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(make_cli: MakeCli) -> Cli:
    """A step whose image, pinned, stays in memory."""
    cli = make_cli(disk={}, host={"on_close": "keep"})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.pin(1)
    return cli


def arena(memory: Path) -> Path:
    return next((memory / "run").glob("*/slot-0.arena"))


def record_offset(memory: Path, start: bytes) -> int:
    """Where a record of that kind begins in the arena's extents."""
    return arena(memory).read_bytes().index(start, EXTENTS_START + 70_000)


def test_memory_is_checked_too(kept: Cli, memory: Path) -> None:
    copies = kept.json("verify")["copies"]
    assert [(c["tier"], c["good"], c["chunks"]) for c in copies] == [
        ("host", True, 3),
        ("disk", True, 3),
    ]
    assert len(kept.json("verify", "1", "--tier", "host")["copies"]) == 1
    flip(arena(memory), EXTENTS_START + 66_000)
    (found,) = damage(kept)
    assert (found["tier"], found["file"], found["chunk"]) == ("host", IMAGE, 1)
    assert found["advice"] == "restores read disk instead"


@pytest.mark.parametrize("what", ["manifest", "commit record", "seal", "marks"])
def test_damage_that_hides_an_image_in_memory_is_found(kept: Cli, memory: Path, what: str) -> None:
    places = {
        "manifest": record_offset(memory, b'{"format":1') + 40,
        "commit record": record_offset(memory, b'"wall_time_s"') + 20,
        "seal": BLOCK_BYTES + 100,
        "marks": BLOCK_BYTES + PAGE_BYTES + 40,
    }
    flip(arena(memory), places[what])
    (found,) = damage(kept)
    assert (found["tier"], found["step"]) == ("host", None)
    assert found["problem"]


def test_an_arena_without_a_usable_header_could_not_be_read(kept: Cli, memory: Path) -> None:
    flip(arena(memory), 40)
    document = kept.json("verify", code=1)
    assert [one["place"] for one in document["unread"]] == ["host"]
    assert [c["tier"] for c in document["copies"]] == ["disk"]


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
    while looks < 10 or len({step for step, _ in seen}) < 6:  # until enough has come and gone
        document = cli.json("verify")
        assert document["damage"] == []
        seen |= {(c["step"], c["tier"]) for c in document["copies"]}
        looks += 1
    assert {tier for _, tier in seen} == {"host", "disk"}


# What was found is known later -----------------------------------------------------------------------


def marks_of_damage(root: Path) -> list[Path]:
    return list(root.rglob("marks/damaged-*"))


def test_the_next_start_takes_it_for_damage_and_repairs_it(cli: Cli, tmp_path: Path) -> None:
    """It restores another step, and reads nothing of this one by itself."""
    flip(folder(tmp_path / "far") / IMAGE, -1)
    assert len(damage(cli)) == 1
    assert cli.steps()["1@1"] == {"disk": "committed", "far": "damaged"}
    with tierfall.open(cli.config) as ckpt:
        assert ckpt.restore(blank()).step == 2
        ckpt.drain()
    assert cli.steps()["1@1"] == {"disk": "committed", "far": "committed"}
    assert marks_of_damage(tmp_path) == []
    assert cli("verify").code == 0


@pytest.mark.parametrize("repaired", ["by the command", "by hand"])
def test_what_was_repaired_is_damaged_no_more(cli: Cli, tmp_path: Path, repaired: str) -> None:
    image = folder(tmp_path / "far") / IMAGE
    flip(image, -1)
    damage(cli)
    assert len(marks_of_damage(tmp_path)) == 1
    if repaired == "by the command":
        cli("verify", "--repair")
    else:
        flip(image, -1)
        assert cli.steps()["1@1"]["far"] == "damaged"  # until somebody reads it
        cli("verify")
    assert cli.steps()["1@1"] == {"disk": "committed", "far": "committed"}
    assert marks_of_damage(tmp_path) == []


def test_it_is_of_one_copy_alone(make_cli: MakeCli, tmp_path: Path) -> None:
    """It goes with the copy that it speaks of, and to no other tier."""
    cli = make_cli(disk={}, far={})
    with tierfall.open(cli.config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    flip(folder(tmp_path / "disk") / IMAGE, -1)
    damage(cli, "--tier", "disk")
    shutil.rmtree(folder(tmp_path / "far"))
    shutil.copytree(folder(tmp_path / "disk"), folder(tmp_path / "far"))
    assert cli.steps()["1@1"] == {"disk": "damaged", "far": "damaged"}  # it is that copy, too
    shutil.rmtree(folder(tmp_path / "far"))
    cli("pin", "1@1", code=1)  # it is abandoned by the next start
    with tierfall.open(cli.config, fresh=True) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    assert cli.steps()["1@2"] == {"disk": "committed", "far": "committed"}
    assert marks_of_damage(tmp_path) != []
    cli("unpin", "1@1")
    cli("rm", "1@1", "--yes")
    assert marks_of_damage(tmp_path) == []


def test_a_damaged_report_of_damage_is_one_all_the_same(cli: Cli, tmp_path: Path) -> None:
    flip(folder(tmp_path / "far") / IMAGE, -1)
    damage(cli)
    (mark,) = marks_of_damage(tmp_path)
    mark.write_bytes(b"")
    assert cli.steps()["1@1"]["far"] == "damaged"
    cli("verify", "--repair")
    assert marks_of_damage(tmp_path) == []


def test_a_tier_that_is_only_read_is_left_alone_and_that_is_reported(
    cli: Cli, tmp_path: Path
) -> None:
    flip(folder(tmp_path / "far") / IMAGE, -1)
    cli.config["tiers"][2]["read_only"] = True
    cli.configure(cli.config)
    before = files_below(tmp_path / "far")
    assert "far 1@1: the damage could not be recorded there" in cli("verify", code=1).out
    assert files_below(tmp_path / "far") == before


def test_a_living_trainer_learns_of_it_before_it_drops_because_of_that_copy(
    make_cli: MakeCli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It still has the step in memory, and writes the copy anew."""
    cli = make_cli(disk={"retain": {"last": 2}})
    with tierfall.open(cli.config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        flip(folder(tmp_path / "disk", 2) / IMAGE, 66_000)
        damage(cli)
        ckpt.save(3, state_of(3), block=True)
        oldest = folder(tmp_path / "disk", 1)
        wait_until(lambda: not (oldest / "commit.json").exists(), "the oldest goes")
        assert "disk: 1@1 is not deleted: disk: 2@1 was found damaged" in caplog.text
        wait_until(lambda: marks_of_damage(tmp_path) == [], "the copy is written anew")
    cli("verify")


def test_what_a_restore_found_is_known_later(
    make_cli: MakeCli, saved: Saved, tmp_path: Path
) -> None:
    cli = make_cli(disk={})
    saved(cli, (1, 2))
    flip(folder(tmp_path / "disk", 2) / IMAGE, 66_000)
    with tierfall.open(cli.config) as ckpt:
        assert ckpt.restore(blank()).step == 1
        ckpt.drain()
    assert cli.steps() == {"1@1": {"disk": "committed"}, "2@1": {"disk": "damaged"}}
