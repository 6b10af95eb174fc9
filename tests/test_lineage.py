"""Lineages: going back to an older step, a reused run name, and an earlier start that is still running."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, open_elsewhere, save_steps, state_of, step_in, steps_on
from tierfall.core.types.errors import FencedError, UnreachableError
from tierfall.setup import tiers

MakeConfig = Callable[..., dict[str, Any]]


def listed(ckpt: tierfall.Checkpointer) -> dict[str, bool]:
    """Every known checkpoint, and whether it is abandoned."""
    return {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}


def names_on(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "run").glob("step-*/commit.json"))


# A start that does not know that it is over ------------------------------------------------------


def test_what_a_zombie_left_in_memory_is_not_believed(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    """Its image stays in its own memory; the next start there continues the newer line."""
    old_config = make_config(host={"folder": str(memory / "old")})
    new_config = make_config(host={"folder": str(memory / "new")})
    zombie = open_elsewhere(old_config)
    zombie.save(1, state_of(1), block=True)
    with tierfall.open(new_config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(2, state_of(2), block=True)
    handle = zombie.save(2, state_of(99))
    with pytest.raises(FencedError):
        handle.wait("disk")
    with pytest.raises(FencedError, match=r"^delete of 1@1: .* was followed by attempt 2"):
        zombie.delete(1)
    zombie.close()
    with tierfall.open(old_config) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, report.attempt, step_in(state)) == (2, 2, 2)
    assert steps_on(tmp_path / "disk") == [1, 2]


@pytest.mark.parametrize("messages", [True, False])
def test_a_zombie_that_restores_does_not_come_back_above_the_living(
    make_config: MakeConfig, tmp_path: Path, messages: bool
) -> None:
    """Whether it has seen the newer attempt yet or not, it must not take a number above it."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    zombie = open_elsewhere(make_config())
    zombie.save(1, state_of(1), block=True)
    with tierfall.open(make_config(host={"folder": str(other)}, run="run")) as living:
        living.restore(blank())
        living.save(2, state_of(2), block=True)
        if messages:
            with pytest.raises(FencedError):
                zombie.save(5, state_of(5), block=True)
        with pytest.raises(FencedError):
            zombie.restore(blank())
        if messages:
            assert zombie.restore(blank(), only=["w"]) is not None  # looking is free
        living.save(3, state_of(3), block=True)
        assert sorted(p.name for p in (tmp_path / "disk/run/attempts").iterdir()) == [
            "a0001.json",
            "a0002.json",
        ]
    with contextlib.suppress(FencedError):
        zombie.close()


# Lines whose successor is gone, and attempts that could not see each other ------------------------


def restored(config: dict[str, Any], **request: Any) -> tuple[str, int]:
    """What a start restores, and the value that is in the state then."""
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state, **request)
        assert report is not None
        return f"{report.step}@{report.attempt}", step_in(state)


def test_a_start_that_saved_nothing_leaves_nothing_behind(make_config: MakeConfig) -> None:
    config = make_config()
    save_steps(config, 1, 2, 3)
    assert restored(config, step=1) == ("1@1", 1)
    assert restored(config) == ("3@1", 3)


def away(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tiers._open_backend

    def opening(section: Any, *, read_only: bool) -> Any:
        if section.name == tier:
            raise UnreachableError(f"{tier}: no answer")
        return real(section, read_only=read_only)

    monkeypatch.setattr(tiers, "_open_backend", opening)


def test_what_goes_on_without_a_tier_comes_after_what_was_saved_there_meanwhile(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = make_config(nvme={}, pfs={"shared": True})
    there = make_config(
        nvme={"path": str(tmp_path / "other")},
        pfs={"shared": True},
        host={"folder": str(tmp_path / "other-memory")},
    )
    save_steps(here, 1, 2)
    save_steps(there, 3, 4, 5)
    with monkeypatch.context() as patch:
        away("pfs", patch)
        with tierfall.open(here) as ckpt:
            ckpt.restore(blank(), unreachable="ignore")
            ckpt.save(3, state_of(-3), block=True)
    caplog.clear()
    assert restored(here)[1] == -3
    assert "an earlier start has abandoned 3@2, 4@2, 5@2; each tier deletes" in caplog.text


def two_lives(config: dict[str, Any], tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """Machines ``a`` and ``b`` each begin anew while ``pfs`` is away, and so take the same number."""
    away("pfs", patch)
    for machine, sign in (("a", 1), ("b", -1)):
        config["tiers"][1]["path"] = str(tmp_path / machine)
        with tierfall.open(config, fresh=True) as ckpt:
            for step in (1, 2, 5) if machine == "a" else (1, 3):
                ckpt.save(step, state_of(sign * step), block=True)
    # b's disk is what all nodes see from now on
    shutil.copytree(tmp_path / "b", tmp_path / "pfs", dirs_exist_ok=True)
    config["tiers"][1]["path"] = str(tmp_path / "a")


@pytest.fixture
def lives(make_config: MakeConfig, tmp_path: Path) -> dict[str, Any]:
    config = make_config(nvme={}, pfs={"shared": True})
    with pytest.MonkeyPatch.context() as patch:
        two_lives(config, tmp_path, patch)
    return config


def test_of_two_lives_of_one_number_the_one_that_began_last_counts_and_the_other_is_named(
    lives: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(lives) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (3, -3)
        number = report.attempt
        assert f"an earlier start has abandoned 2@{number}, 5@{number}; each tier" in caplog.text
        assert listed(ckpt) == {
            f"1@{number}": False, f"2@{number}": True, f"3@{number}": False, f"5@{number}": True,
        }  # fmt: skip
        handle = ckpt.save(6, state_of(-6), block=True)
        assert handle.attempt == number + 1
        ckpt.drain()
    assert restored(lives)[1] == -6


def test_the_newer_life_of_a_lower_number_is_abandoned_until_the_run_goes_on_from_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Machine ``a`` goes on while ``pfs`` is away; then ``b`` goes on from what is there, and never sees a's disk."""
    config = make_config(nvme={}, pfs={"shared": True})
    elsewhere = make_config(nvme={"path": str(tmp_path / "b")}, pfs={"shared": True})
    elsewhere["tiers"][0]["folder"] = str(tmp_path / "memory-of-b")
    save_steps(config, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        away("pfs", patch)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank(), unreachable="ignore")
            ckpt.save(3, state_of(3), block=True)
    with tierfall.open(elsewhere) as ckpt:
        ckpt.restore(blank())
        number = ckpt.save(9, state_of(-9), block=True).attempt
        ckpt.drain()
    with tierfall.open(config) as ckpt:
        ckpt.pin(9, attempt=number)  # else it goes from pfs as soon as that has step 3
        assert ckpt.restore(blank()) is not None
        assert listed(ckpt)[f"9@{number}"]
        state = blank()
        ckpt.restore(state, step=9, attempt=number)
        assert step_in(state) == -9
        ckpt.save(10, state_of(-10), block=True)
        ckpt.drain()
    assert restored(config)[1] == -10


def test_nothing_of_the_other_life_goes_before_the_run_has_gone_on(
    lives: dict[str, Any], tmp_path: Path
) -> None:
    """Which one began last goes by clocks of two machines: that alone deletes nothing."""
    with tierfall.open(lives) as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
        ckpt.prune()
    assert {"step-00000002-a1001", "step-00000005-a1001"} <= set(names_on(tmp_path / "a"))
