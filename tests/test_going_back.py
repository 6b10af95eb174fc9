"""Lines of saving: going back to an older step, a reused name, and an earlier start that does not know it is over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, files_below, open_elsewhere, state_of, step_in, steps_on, wait_until
from tierfall.core.errors import FencedError, StepError
from tierfall.session import Session
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


@pytest.mark.parametrize("told", [True, False])
def test_a_zombie_that_restores_does_not_come_back_above_the_living(
    make_config: MakeConfig, tmp_path: Path, told: bool
) -> None:
    """Whether it has seen the newer attempt yet or not, it must not take a number above it."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    zombie = open_elsewhere(make_config())
    zombie.save(1, state_of(1), block=True)
    with tierfall.open(make_config(host={"folder": str(other)}, run="run")) as living:
        living.restore(blank())
        living.save(2, state_of(2), block=True)
        if told:
            with pytest.raises(FencedError):
                zombie.save(5, state_of(5), block=True)
        with pytest.raises(FencedError):
            zombie.restore(blank())
        if told:
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
    take = Session.take_attempt

    def slowly(session: Session) -> Any:
        commit.set()
        wait_until(lambda: handle.done("disk"), "step 3 is committed")
        session.ask(lambda: None)
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
        monkeypatch.setattr(Session, "take_attempt", slowly)
        report = ckpt.restore(blank(), step=1)
        assert report is not None
        ckpt.drain()
        assert 1 in steps_on(tmp_path / "disk")
