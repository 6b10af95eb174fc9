"""Lineages: going back to an older step, a reused run name, and an earlier start that is still running."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, files_below, open_elsewhere, state_of, step_in, steps_on, wait_until
from tierfall.core.types.errors import FencedError, RestoreError, StepError, UnreachableError
from tierfall.session.session import Session
from tierfall.setup import tiers
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]


def listed(ckpt: tierfall.Checkpointer) -> dict[str, bool]:
    """Every known checkpoint, and whether it is abandoned."""
    return {f"{c.step}@{c.attempt}": c.abandoned for c in ckpt.checkpoints()}


def names_on(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "run").glob("step-*/commit.json"))


def save_steps(config: dict[str, Any], steps: range) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


def test_going_back_and_saving_the_old_steps_again(make_config: MakeConfig, tmp_path: Path) -> None:
    """The far tier survives more, so its old line stays until the new line has a copy there."""
    config = make_config(disk={}, far={"shared": True, "flush": {"every": 2}})
    save_steps(config, range(1, 5))
    assert steps_on(tmp_path / "disk") == [1, 2, 3, 4]
    assert steps_on(tmp_path / "far") == [2, 4]
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state, step=2)
        assert report is not None
        assert (report.step, report.attempt, step_in(state)) == (2, 1, 2)
        assert listed(ckpt) == {"1@1": False, "2@1": False, "3@1": False, "4@1": False}
        handle = ckpt.save(3, state_of(3))
        handle.wait("disk")
        ckpt.drain()
        assert handle.attempt == 2
        assert listed(ckpt) == {"1@1": False, "2@1": False, "3@2": False, "4@1": True}
        assert names_on(tmp_path / "far") == ["step-00000002-a0001", "step-00000004-a0001"]
        old = blank()
        back = ckpt.restore(old, step=4, attempt=1, only=["w", "extra"])
        assert back is not None
        assert (back.attempt, step_in(old)) == (1, 4)
        newest = ckpt.restore(state)
        assert newest is not None
        assert (newest.step, newest.attempt, step_in(state)) == (3, 2, 3)
    with tierfall.open(config) as ckpt:
        newest = ckpt.restore(state)
        assert newest is not None
        assert (newest.step, newest.attempt) == (3, 2)
        assert ckpt.save(4, state_of(4), block=True) is not None
        ckpt.drain()
        assert listed(ckpt) == {"1@1": False, "2@1": False, "3@2": False, "4@4": False}
    assert names_on(tmp_path / "far") == ["step-00000002-a0001", "step-00000004-a0004"]
    assert steps_on(tmp_path / "far") == [2, 4]
    assert steps_on(tmp_path / "disk") == [1, 2, 3, 4]


def test_going_back_in_the_same_process_begins_a_line_of_its_own(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        state = blank()
        ckpt.restore(state, step=1)
        again = ckpt.save(2, state_of(2), block=True)
        assert again.attempt == 2
        ckpt.drain()
        in_memory = {"2@1": True, "3@1": True}
        assert listed(ckpt) == {"1@1": False, "2@2": False, **in_memory}
    assert names_on(tmp_path / "disk") == ["step-00000001-a0001", "step-00000002-a0002"]
    assert (tmp_path / "disk" / "run" / "latest").read_text() == "step-00000002-a0002\n"


def test_restoring_a_part_begins_no_line(make_config: MakeConfig, tmp_path: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.restore(blank(), step=1, only=["w"])
        with pytest.raises(StepError, match="at step 3 already"):
            ckpt.save(2, state_of(2))
        assert ckpt.save(4, state_of(4), block=True).attempt == 1
    assert steps_on(tmp_path / "disk") == [1, 2, 3, 4]


def test_a_pinned_checkpoint_of_an_abandoned_line_stays(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.pin(3)
        ckpt.restore(blank(), step=1)
        ckpt.save(2, state_of(2), block=True)
        ckpt.drain()
        assert listed(ckpt) == {"1@1": False, "2@1": True, "2@2": False, "3@1": True}
        newest = ckpt.restore(blank())
        assert newest is not None
        assert (newest.step, newest.attempt) == (2, 2)
    assert names_on(tmp_path / "disk") == [
        "step-00000001-a0001",
        "step-00000002-a0002",
        "step-00000003-a0001",
    ]


# A name that is used already ---------------------------------------------------------------------


def test_a_start_that_restored_nothing_must_not_save_over_a_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    save_steps(config, range(1, 3))
    with tierfall.open(config) as ckpt:
        before = files_below(tmp_path / "disk")
        for step in (1, 3):
            with pytest.raises(
                StepError, match=r"has checkpoints already.*restore\(\).*run name.*fresh=True"
            ):
                ckpt.save(step, state_of(99))
        assert files_below(tmp_path / "disk") == before
        ckpt.restore(blank())
        ckpt.save(3, state_of(3), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2, 3]


def test_fresh_leaves_the_old_checkpoints_behind(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    save_steps(config, range(5, 8))
    with tierfall.open(config, fresh=True) as ckpt:
        assert steps_on(tmp_path / "disk") == [5, 6, 7]
        ckpt.save(1, state_of(1), block=True)
        ckpt.drain()
    assert names_on(tmp_path / "disk") == ["step-00000001-a0002"]
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 1


# A start that does not know that it is over ------------------------------------------------------


def test_a_zombie_is_fenced_and_changes_nothing(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    """Two machines: each its own memory, the same folder."""
    old_config = make_config(host={"folder": str(memory / "old")}, disk={"retain": {"last": 2}})
    new_config = make_config(host={"folder": str(memory / "new")}, disk={"retain": {"last": 2}})
    zombie = open_elsewhere(old_config)
    zombie.save(1, state_of(1), block=True)
    zombie.save(2, state_of(2), block=True)
    with tierfall.open(new_config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2
        ckpt.save(3, state_of(3), block=True)
        ckpt.drain()
        before = files_below(tmp_path / "disk")
        handle = zombie.save(3, state_of(99))
        with pytest.raises(FencedError, match=r"attempt 1 .* followed by attempt 2"):
            handle.wait("disk")
        assert handle.outcome == "failed"
        with pytest.raises(FencedError, match=r"attempt 1 .* attempt 2 .*must stop"):
            zombie.save(4, state_of(99))
        zombie.prune()
        zombie.close()
        after = files_below(tmp_path / "disk")
        assert {name: after.get(name) for name in before} == before
        assert not [name for name in set(after) - set(before) if name.endswith("commit.json")]
        ckpt.save(4, state_of(4), block=True)
        newest = ckpt.restore(state)
        assert newest is not None
        assert (newest.step, newest.attempt, step_in(state)) == (4, 2, 4)
    with tierfall.open(new_config) as ckpt:
        ckpt.restore(state)
        assert step_in(state) == 4
        ckpt.drain()
    assert names_on(tmp_path / "disk") == ["step-00000003-a0002", "step-00000004-a0002"]
    assert not [path for path in (tmp_path / "disk").rglob("*") if "a0001" in path.parts[-2]]


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


def test_what_is_restored_is_protected_before_anything_may_be_dropped(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the line before is committed while an old step is restored: retention must wait for the new line."""
    take = Session.begin_attempt

    def slowly(session: Session) -> Any:
        commit.set()
        wait_until(lambda: handle.done("disk"), "step 3 is committed")
        session.call(lambda: None)
        return take(session)

    commit, arrived = threading.Event(), threading.Event()
    original = StoredTier.commit

    def held(*words: Any, **more: Any) -> None:
        arrived.set()
        assert commit.wait(30)
        original(*words, **more)

    with tierfall.open(make_config(disk={"retain": {"last": 2}})) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        monkeypatch.setattr(StoredTier, "commit", held)
        handle = ckpt.save(3, state_of(3))
        assert arrived.wait(30)
        monkeypatch.setattr(Session, "begin_attempt", slowly)
        report = ckpt.restore(blank(), step=1)
        assert report is not None
        ckpt.drain()
        assert 1 in steps_on(tmp_path / "disk")


# Lines whose successor is gone, and attempts that could not see each other ------------------------


def restored(config: dict[str, Any], **request: Any) -> tuple[str, int]:
    """What a start restores, and the value that is in the state then."""
    with tierfall.open(config) as ckpt:
        state = blank()
        report = ckpt.restore(state, **request)
        assert report is not None
        return f"{report.step}@{report.attempt}", step_in(state)


def test_what_was_left_behind_stays_so_when_the_line_that_left_it_is_gone(
    make_config: MakeConfig,
) -> None:
    """Retention drops every checkpoint of attempt 2, which had gone back from 400@1 to 100@1."""
    config = make_config(disk={"retain": {"last": 2}})
    with tierfall.open(config) as ckpt:
        for step in (100, 200, 300, 400):
            ckpt.save(step, state_of(step if step == 100 else -step), block=True)
            if step in (100, 400):
                ckpt.pin(step)
    for begin, steps in ((100, (200, 300, 400)), (None, (500, 600, 700))):
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank(), step=begin)
            for step in steps:
                ckpt.save(step, state_of(step), block=True)
            ckpt.drain()
            assert listed(ckpt)["400@1"]
    with tierfall.open(config) as ckpt:
        assert listed(ckpt) == {"100@1": False, "400@1": True, "600@3": False, "700@3": False}
        with pytest.raises(RestoreError, match=r"400@1: its lineage was abandoned"):
            ckpt.restore(blank(), step=400)
    assert restored(config) == ("700@3", 700)
    assert restored(config, step=400, attempt=1) == ("400@1", -400)


def test_a_line_stays_left_behind_when_a_person_removes_all_that_came_after_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    save_steps(config, range(1, 4))
    with tierfall.open(config) as ckpt:
        ckpt.pin(3)
        ckpt.restore(blank(), step=1)
        ckpt.save(2, state_of(-2), block=True)
    shutil.rmtree(tmp_path / "disk" / "run" / "step-00000002-a0002")
    (tmp_path / "disk" / "run" / "latest").unlink()  # else that step is away
    assert restored(config) == ("1@1", 1)


def test_a_start_that_saved_nothing_leaves_nothing_behind(make_config: MakeConfig) -> None:
    config = make_config()
    save_steps(config, range(1, 4))
    assert restored(config, step=1) == ("1@1", 1)
    assert restored(config) == ("3@1", 3)


def away(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tiers._open_backend

    def opening(section: Any, *, read_only: bool) -> Any:
        if section.name == tier:
            raise UnreachableError(f"{tier}: no answer")
        return real(section, read_only=read_only)

    monkeypatch.setattr(tiers, "_open_backend", opening)


def test_what_begins_anew_while_a_tier_is_away_comes_after_all_that_lies_there(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(nvme={}, pfs={"shared": True})
    for start in (range(1, 4), range(4, 8)):  # two attempts, of which another machine sees none
        save_steps(config, start)
    shutil.rmtree(tmp_path / "nvme")
    with monkeypatch.context() as patch:
        away("pfs", patch)
        with tierfall.open(config, fresh=True) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, state_of(-step), block=True)
    assert restored(config)[1] == -3
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        assert {name for name, left in listed(ckpt).items() if not left} == {
            name for name in listed(ckpt) if int(name.split("@")[1]) > 2
        }


def test_what_goes_on_without_a_tier_comes_after_what_was_saved_there_meanwhile(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = make_config(nvme={}, pfs={"shared": True})
    there = make_config(nvme={"path": str(tmp_path / "other")}, pfs={"shared": True})
    save_steps(here, range(1, 3))
    save_steps(there, range(3, 6))
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


def test_of_two_lives_of_one_number_the_one_that_began_last_counts_and_it_is_reported_once(
    lives: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(lives) as ckpt:
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (3, -3)
        ckpt.restore(state)
        output = [r.getMessage() for r in caplog.records if "two starts" in r.getMessage()]
        assert len(output) == 1
        number = report.attempt
        assert f"2@{number} on nvme" in output[0]
        assert f"restore(step=5, attempt={number})" in output[0]
        assert listed(ckpt) == {
            f"1@{number}": False, f"2@{number}": True, f"3@{number}": False, f"5@{number}": True,
        }  # fmt: skip
        handle = ckpt.save(6, state_of(-6), block=True)
        assert handle.attempt == number + 1
        ckpt.drain()
    assert restored(lives)[1] == -6


def test_an_older_life_of_a_higher_number_is_not_restored_without_a_word(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Machine ``a`` goes on while ``pfs`` is away; then ``b`` goes on from what is there, and never sees a's disk."""
    config = make_config(nvme={}, pfs={"shared": True})
    elsewhere = make_config(nvme={"path": str(tmp_path / "b")}, pfs={"shared": True})
    elsewhere["tiers"][0]["folder"] = str(tmp_path / "memory-of-b")
    save_steps(config, range(1, 3))
    with pytest.MonkeyPatch.context() as patch:
        away("pfs", patch)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank(), unreachable="ignore")
            ckpt.save(3, state_of(3), block=True)
    with tierfall.open(elsewhere) as ckpt:
        ckpt.restore(blank())
        number = ckpt.save(9, state_of(-9), block=True).attempt
        ckpt.drain()
    caplog.clear()
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(blank()) is not None
        output = [r.getMessage() for r in caplog.records if "could see the other" in r.getMessage()]
        assert len(output) == 1
        assert f"restore(step=9, attempt={number})" in output[0]
        assert f"9@{number} on pfs" in output[0]
        state = blank()
        ckpt.restore(state, step=9, attempt=number)
        assert step_in(state) == -9
        ckpt.save(10, state_of(-10), block=True)
        ckpt.drain()
    caplog.clear()
    assert restored(config)[1] == -10
    assert "could see the other" not in caplog.text, "the run has gone on from it"


def test_nothing_of_the_other_life_goes_before_the_run_has_gone_on(
    lives: dict[str, Any], tmp_path: Path
) -> None:
    """Which one began last goes by clocks of two machines: that alone deletes nothing."""
    with tierfall.open(lives) as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
        ckpt.prune()
    assert {"step-00000002-a1001", "step-00000005-a1001"} <= set(names_on(tmp_path / "a"))


def test_a_person_goes_back_to_the_other_life_by_step_and_attempt(lives: dict[str, Any]) -> None:
    with tierfall.open(lives) as ckpt:
        number = ckpt.checkpoints()[0].attempt
        state = blank()
        ckpt.restore(state, step=5, attempt=number)
        assert step_in(state) == 5
        ckpt.save(6, state_of(6), block=True)
        ckpt.drain()
    with tierfall.open(lives) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 6
        assert not listed(ckpt)[f"5@{number}"]
        assert listed(ckpt).get(f"3@{number}", True)
