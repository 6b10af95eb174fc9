"""Attempt records that are damaged, missing or copied to another number: the error names them and the way out; no
checkpoint is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, memory_of, state_of, step_in, steps_on
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import load_config
from tierfall.core.types.errors import (
    ConfigError,
    IntegrityError,
    StorageFullError,
)
from tierfall.ops.drain import drain

MakeConfig = Callable[..., dict[str, Any]]
DAMAGE = pytest.mark.parametrize("how", ["empty", "gone"])


def record(tmp_path: Path, number: int) -> Path:
    return tmp_path / f"disk/run/attempts/a{number:04d}.json"


def damage(path: Path, how: str = "empty") -> None:
    if how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


def leave_in_memory(config: dict[str, Any], *steps: int) -> None:
    """Save steps of which every second goes to the disk; the last stays in memory alone."""
    with tierfall.open(config) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


@DAMAGE
def test_memory_is_taken_up_where_commit_records_say_whose_its_attempt_is(
    how: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"flush": {"every": 2}})
    leave_in_memory(config, 1, 2, 3)
    damage(record(tmp_path, 1), how)
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 3
        ckpt.save(4, state_of(4), block=True)
    assert steps_on(tmp_path / "disk") == [2, 4]


def test_memory_whose_attempt_nobody_can_name_is_named_with_the_way_out(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    config = make_config(disk={"flush": {"every": 2}})
    leave_in_memory(config, 1)
    damage(record(tmp_path, 1))
    (memory_of(config) / "tiers.json").unlink()  # by which this machine knows the tiers
    with pytest.raises(ConfigError) as caught:
        tierfall.open(config)
    for output in (str(next(memory.rglob("*.image")).parent), "1@1", "damaged", "tierfall drain"):
        assert output in str(caught.value)
    drained = drain(load_config(make_config()), 30.0)
    assert [str(owed.checkpoint) for owed in drained.done] == ["1@1"]
    with tierfall.open(config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 1


def test_a_drain_leaves_memory_where_a_newer_record_is_damaged(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    leave_in_memory(make_config(disk={"flush": {"every": 2}}), 1)
    record(tmp_path, 2).write_bytes(b"")
    with pytest.raises(IntegrityError, match=r"a0002\.json.*newer start.*start the training here"):
        drain(load_config(make_config()), 30.0)
    assert list(memory.rglob("*.image"))
    record(tmp_path, 2).unlink()
    assert drain(load_config(make_config()), 30.0).done


def test_the_own_record_is_written_anew_in_mid_run(make_config: MakeConfig, tmp_path: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        damage(record(tmp_path, 1))
        ckpt.save(2, state_of(2), block=True)
    assert steps_on(tmp_path / "disk") == [1, 2]
    assert record(tmp_path, 1).stat().st_size


def test_a_record_that_was_copied_to_the_last_number_is_named(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    stray = record(tmp_path, 999999999999)
    stray.write_bytes(record(tmp_path, 1).read_bytes())
    with pytest.raises(ConfigError, match=r"attempt 999999999999 on disk.*remove its record"):
        tierfall.open(make_config())
    stray.unlink()
    with tierfall.open(make_config()) as ckpt:
        ckpt.restore(blank())
        assert ckpt.save(2, state_of(2), block=True).attempt == 2
    assert steps_on(tmp_path / "disk") == [1, 2]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("first", [True, False])
def test_what_a_start_on_a_full_disk_left_in_memory_is_its_runs(
    first: bool, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tier took the record of its attempt: the next start knows the tiers by their ids."""
    config = make_config(disk={}, max_wait="0.3s")
    if not first:
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            ckpt.save(1, state_of(1), block=True)

    def full(*arguments: Any, **more: Any) -> Any:
        raise StorageFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "create", full)
        with tierfall.open(config) as ckpt:
            ckpt.restore(blank())
            handle = ckpt.save(2, state_of(2))
            handle.wait("host")
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state := blank())
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
        ckpt.drain()
    assert steps_on(tmp_path / "disk") == ([2] if first else [1, 2])
