"""Copies that were purged, truncated or silently damaged under their commit record: they are told as damage, protect
nothing, and are written anew from a good copy."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.cli.cli_kit import Cli
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all, restore_all
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.core.types.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]


def image(root: Path, step: int, run: str = "run") -> Path:
    (found,) = (root / run).glob(f"step-{step:08d}-*/*.safetensors*")
    return found


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def save_steps(config: dict[str, Any], *steps: int) -> None:
    """Save these steps; memory keeps none of them."""
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        for step in steps:
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()


def told(ckpt: Any, step: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return where a trainer says that a step is, and what it says is damaged."""
    (info,) = [info for info in ckpt.checkpoints() if info.step == step]
    return {tier: str(state) for tier, state in info.tiers.items()}, info.damage


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("how", ["purged", "truncated"])
def test_a_purged_image_never_costs_the_good_copy(
    how: str, compress: str | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    far = {} if compress is None else {"compress": {"codec": compress}}
    config = make_config(near={"capacity": "400KiB"}, far=far)
    save_steps(config, 1, 2)
    victim = image(tmp_path / "far", 1)
    if how == "purged":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:100])
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
        assert told(ckpt, 1) == ({"near": "committed", "far": "committed"}, {})
        for step in (3, 4):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
    assert steps_on(tmp_path / "far") == [1, 2, 3, 4]


def test_ls_tells_what_was_purged(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(near={}, far={})
    save_steps(config, 1, 2)
    image(tmp_path / "far", 1).unlink()
    cli = Cli(tmp_path, config)
    output = cli("ls", code=1)
    assert "1@1 is damaged on tier far" in output.err
    assert "it is missing" in output.err
    copies = cli("ls", "--json", code=1).document["checkpoints"][0]["copies"]
    assert (copies["near"]["state"], copies["far"]["state"]) == ("committed", "damaged")
    assert "it is missing" in copies["far"]["damage"]


def test_with_nothing_to_repair_it_from_damage_is_reported_and_older_steps_restore(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={})
    save_steps(config, 1, 2)
    image(tmp_path / "disk", 2).unlink()
    with tierfall.open(config) as ckpt:
        tiers, damage = told(ckpt, 2)
        assert tiers == {}
        assert "it is missing" in damage["disk"]
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (1, 1)


def test_chunks_of_two_damaged_copies_still_make_one_state(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The one lacks its end, the other has a wrong bit at its beginning."""
    config = make_config(near={}, far={})
    save_steps(config, 1)
    cut, wrong = image(tmp_path / "near", 1), image(tmp_path / "far", 1)
    cut.write_bytes(cut.read_bytes()[: 70 << 10])
    flip(wrong, at=30 << 10)
    with tierfall.open(config) as ckpt:
        state = blank()
        assert ckpt.restore(state) is not None
        assert step_in(state) == 1


# What readers find -------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_what_a_restore_finds_damaged_is_reported_and_written_anew(
    compress: str | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    near = {} if compress is None else {"compress": {"codec": compress}}
    config = make_config(near=near, far={"capacity": "400KiB"})
    save_steps(config, 1, 2)
    flip(image(tmp_path / "near", 2), at=500)
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
        ckpt.drain()
        assert told(ckpt, 2) == ({"near": "committed", "far": "committed"}, {})
        for step in (3, 4):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
    assert steps_on(tmp_path / "near") == [1, 2, 3, 4]


@pytest.mark.parametrize("by", ["config", "folder"])
def test_what_a_load_in_the_trainers_process_finds_damaged_is_reported(
    by: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(near={}, far={})
    save_steps(config, 1)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        flip(image(tmp_path / "near", 1), at=500)
        if by == "config":
            assert step_in(tierfall.load(config)) == 1
        else:
            with pytest.raises(RestoreError):
                tierfall.load(tmp_path / "near")
        ckpt.drain()
        assert told(ckpt, 1) == ({"near": "committed", "far": "committed"}, {})
    assert steps_on(tmp_path / "near") == [1]


@pytest.mark.parametrize("every", [1, 50])
def test_an_image_in_memory_that_is_damaged_is_reported_or_leaves(
    every: int, make_config: MakeConfig, memory: Path
) -> None:
    """It leaves where the disk has the checkpoint, too."""
    config = make_config(disk={"flush": {"every": every}})
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
        overwrite(memory, 1)
        if every == 1:
            report = ckpt.restore(blank(), step=1)
            assert report is not None
            wait_until(lambda: told(ckpt, 1) == ({"disk": "committed"}, {}), "it leaves")
        else:
            with pytest.raises(RestoreError):
                ckpt.restore(blank(), step=1)
            wait_until(lambda: "its digest" in told(ckpt, 1)[1].get("host", ""), "it is told")
        ckpt.restore(blank(), step=2)
        for step in range(3, 60):
            ckpt.save(step, state_of(step), block=True)
        assert all(not info.damage for info in ckpt.checkpoints())


RECORDS = {"manifest": b'"structure"', "commit": b'"tags"'}


@pytest.mark.parametrize("record", RECORDS)
def test_damaged_records_of_an_image_in_memory_are_no_first_start(
    record: str, memory: Path
) -> None:
    """They hold up no start, and are never taken for nothing: an older image is restored, and reported, or none."""
    host = {"name": "host", "kind": "host", "folder": str(memory), "on_close": "keep"}
    config = {"run": "run", "tiers": [host]}
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).captured()
    damage_records(memory, RECORDS[record], 2)
    for _ in range(2):
        with tierfall.open(config) as ckpt:
            report = ckpt.restore(blank())
        assert report is not None
        assert report.step == 1
        assert record in str(report.fallbacks), report
    damage_records(memory, RECORDS[record], 1)
    for _ in range(2):
        with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="damaged"):
            ckpt.restore(blank())
    with tierfall.open(config, fresh=True) as ckpt:
        for step in (3, 4, 5):
            ckpt.save(step, state_of(step)).captured()
    state = blank()
    with tierfall.open(config) as ckpt:
        ckpt.restore(state)
    assert step_in(state) == 5


@pytest.mark.parametrize("record", RECORDS)
def test_beside_a_good_copy_damaged_records_in_memory_cost_nothing(
    record: str, make_config: MakeConfig, memory: Path
) -> None:
    config = make_config(host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    damage_records(memory, RECORDS[record], 1)
    state = blank()
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert {source.tier for source in report.sources} == {"disk"}
        ckpt.save(2, state_of(2), block=True)
    assert step_in(state) == 1


def damage_records(memory: Path, word: bytes, step: int) -> None:
    """Flip a bit of what follows a word in the record of a step's image."""
    (arena,) = memory.rglob("*.arena")
    data = arena.read_bytes()
    found = re.search(rb'"run":"run","step":%d,.{,3000}?%b' % (step, word), data, re.DOTALL)
    assert found is not None
    with arena.open("r+b") as file:
        file.seek(found.end() + 2)
        file.write(bytes([data[found.end() + 2] ^ 1]))


def overwrite(memory: Path, step: int) -> None:
    """Change a value of a step's image in memory."""
    (arena,) = memory.rglob("*.arena")
    at = arena.read_bytes().index(struct.pack("<100f", *[step] * 100))
    with arena.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")


def test_damage_that_nothing_can_mend_stays_reported(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"retain": {"last": 1}})
    save_steps(config, 1)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        flip(image(tmp_path / "disk", 1), at=500)
        with pytest.raises(RestoreError):
            ckpt.restore(blank(), step=1)
        tiers, damage = told(ckpt, 1)
        assert tiers == {}
        assert "does not match its digest" in damage["disk"]


@pytest.mark.parametrize("shared", [True, False])
def test_what_one_rank_finds_reaches_all_and_is_written_anew(shared: bool, tmp_path: Path) -> None:
    with network(["a", "a"]) as ranks:
        opener = Opener(tmp_path, ranks)
        opener.place_of = {0: 0, 1: 0}
        opened = opener.all_open()
        for ckpt, handle in [(c, c.save(1, {"w": torch.full((4096,), 1.0)})) for c in opened]:
            handle.wait("far", timeout=8)
            assert ckpt.checkpoints()
        close_all(opened)
    folder = tmp_path / "0" / "nvme" / "run" / "step-00000001-a0001"
    flip(folder / "rank-00001-of-00002.safetensors", at=-1)
    with network(["a", "a"]) as ranks:
        opener = Opener(tmp_path, ranks)
        opener.place_of = {0: 0, 1: 0}
        opened = opener.all_open()
        restore_all(opened, [{"w": torch.zeros(4096)} for _ in opened])
        wait_until(
            lambda: (
                all(told(c, 1)[0].get("nvme") == "committed" for c in opened)
                and tierfall.load(folder)["w"][-1] == 1.0
            ),
            "it is written anew",
        )
        close_all(opened)
    assert on_all([lambda: tierfall.load(folder)["w"].sum().item()]) == [4096.0]
