"""No rule deletes a copy while the copies that it relies on were not verified, or written, by this run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, flip, save_steps, state_of, step_in, wait_until

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def on(tmp_path: Path) -> Callable[..., list[int]]:
    """``on("disk")``: the steps of which a tier has a folder."""
    return lambda tier: sorted(
        int(path.name[5:13]) for path in (tmp_path / tier / "run").glob("step-*")
    )


@pytest.fixture
def damage(tmp_path: Path) -> Callable[..., None]:
    """``damage("disk", 3)``: flip a bit in the image of a step on a tier."""

    def flip_a_bit(tier: str, step: int) -> None:
        (image,) = (tmp_path / tier / f"run/step-{step:08d}-a0001").glob("*.safetensors")
        flip(image)

    return flip_a_bit


def is_idle(ckpt: tierfall.Checkpointer) -> bool:
    """Say whether all is done that the coordinator has to do now."""
    return ckpt._session.wait_idle(20)


# A tier that the restore did not read ----------------------------------------------------------------


@pytest.fixture
def two_tiers(make_config: MakeConfig) -> Callable[..., dict[str, Any]]:
    """``two_tiers(retain={...})``: the chain of a run that has steps 1 to 3 on ``disk`` and on ``archive``, which is
    set so."""

    def chain(**archive: Any) -> dict[str, Any]:
        return make_config(disk={}, archive={"shared": True, **archive})

    save_steps(chain(), 1, 2, 3)
    return chain


def test_what_is_damaged_and_lies_nowhere_else_keeps_the_older_ones(
    two_tiers: Callable[..., dict[str, Any]],
    on: Callable[..., list[int]],
    damage: Callable[..., None],
    tmp_path: Path,
) -> None:
    damage("archive", 3)
    shutil.rmtree(tmp_path / "disk/run/step-00000003-a0001")
    (tmp_path / "disk/run/latest").unlink()  # else the folder may be away, and no rule deletes
    with tierfall.open(two_tiers(retain={"last": 1})) as ckpt:
        ckpt.restore(blank(), step=2)
        wait_until(lambda: 1 not in on("archive"), "2 was read, and 1 went")
        assert is_idle(ckpt)
        assert 2 in on("archive")


def test_a_damaged_copy_makes_no_room(
    two_tiers: Callable[..., dict[str, Any]],
    on: Callable[..., list[int]],
    damage: Callable[..., None],
    tmp_path: Path,
) -> None:
    for step in (2, 3):
        damage("archive", step)
    taken = sum(f.stat().st_size for f in (tmp_path / "archive").rglob("step-*/*"))
    with tierfall.open(two_tiers(capacity=taken + 10_000)) as ckpt:
        ckpt.restore(blank())
        ckpt.save(4, state_of(4)).wait("disk", timeout=20)
        assert is_idle(ckpt)
        assert 1 in on("archive")


# Removed while the trainer lives ----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["step-*", "step-*/*.safetensors"])
def test_close_keeps_memory_when_what_it_had_brought_to_tiers_is_gone(
    make_config: MakeConfig, tmp_path: Path, part: str
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.restore(blank())
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        assert is_idle(ckpt)
        for path in (tmp_path / "disk" / "run").glob(part):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    state = blank()
    with tierfall.open(make_config()) as ckpt:
        report = ckpt.restore(state)
    assert report is not None
    assert (report.step, step_in(state)) == (2, 2)
