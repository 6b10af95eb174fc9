"""A tier's folder that goes away while training runs: the cause and the cure are logged, `close` says what is left and
where, and the next start restores that."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tierfall
from tests.steps import blank, open_elsewhere, state_of, step_in, steps_on, wait_until
from tierfall.cli.app import app
from tierfall.config import load_config
from tierfall.core.types.errors import ConfigError, RestoreError
from tierfall.ops.drain import drain

MakeConfig = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def texts(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return what was logged at a level or above."""
    caplog.set_level(logging.INFO, "tierfall")
    return lambda level=logging.WARNING: [
        r.getMessage() for r in caplog.records if r.levelno >= level
    ]


def delete(folder: Path) -> None:
    shutil.rmtree(folder)


def make_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


def delete_run(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def restores(config: dict[str, Any], step: int) -> None:
    """Start the run, which restores a step from memory, and finish all copies."""
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state := blank())
        assert report is not None
        assert step_in(state) == report.step == step
        assert {source.tier for source in report.sources} == {"host"}


@pytest.mark.parametrize("others", [{}, {"far": {"flush": {"every": 2}}}], ids=["alone", "far"])
@pytest.mark.parametrize("lose", [delete, make_anew, move_away])
def test_a_folder_that_is_lost_in_mid_run_loses_nothing_that_memory_has(
    lose: Callable[[Path], None],
    others: dict[str, Any],
    make_config: MakeConfig,
    tmp_path: Path,
    texts: Callable[..., list[str]],
) -> None:
    config = make_config(disk={}, **others, max_wait="1s")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        lose(tmp_path / "disk")
        ckpt.save(2, state_of(2))
        wait_until(lambda: any("2@1 to disk" in text for text in texts()), "it is reported")
        first = next(text for text in texts() if "disk" in text)
        assert f"{tmp_path / 'disk'}: the" in first
        assert "is gone" in first or "is not the one that was opened" in first
        assert "Mount it again, or move it back" in first
        assert "start it again" in first
        ckpt.save(3, state_of(3))
    end = texts(logging.INFO)
    (cause,) = [t for t in end if t.startswith("close: tier disk does not answer or accepts no")]
    assert "Mount it again, or move it back" in cause, cause
    assert "run run is closed; its newest checkpoint is 3@1, on host" in end
    assert any(": 3@1 is in the memory of this machine alone" in text for text in texts())
    restores(config, 3)
    assert steps_on(tmp_path / "disk")[-1] == 3


@pytest.mark.parametrize("lose", [delete, make_anew, delete_run])
def test_close_names_no_tier_that_has_lost_the_newest(
    lose: Callable[[Path], None],
    make_config: MakeConfig,
    tmp_path: Path,
    texts: Callable[..., list[str]],
) -> None:
    """Everything was flushed when the folder went."""
    config = make_config()
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        lose(tmp_path / "disk")
    assert "run run is closed; its newest checkpoint is 2@1, on host" in texts(logging.INFO)
    assert any(": 2@1 is in the memory of this machine alone" in text for text in texts())
    restores(config, 2)


def test_close_names_the_tier_on_which_it_has_written_lost_files_anew(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    """Memory is released, so that no other tier has it."""
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        for image in (tmp_path / "disk").glob("run/step-*/*.safetensors"):
            image.unlink()
    assert any("1@1 is damaged, and is written anew" in text for text in texts(logging.INFO))
    assert texts(logging.INFO)[-1] == "run run is closed; its newest checkpoint is 1@1, on disk"
    assert steps_on(tmp_path / "disk") == [1]


def test_copies_go_on_in_a_folder_that_is_moved_back(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    config = make_config(max_wait="300ms")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        move_away(tmp_path / "disk")
        handle = ckpt.save(2, state_of(2))
        wait_until(lambda: handle.exception() is not None, "the tier is reported")
        (tmp_path / "away").rename(tmp_path / "disk")
        wait_until(lambda: handle.done("disk"), "the copy arrives")
        end = "tier disk accepts copies again; copies that it is still owed: 0"
        wait_until(lambda: end in texts(logging.ERROR), "its end is logged at the same level")
    assert texts(logging.INFO)[-1] == "run run is closed; its newest checkpoint is 2@1, on disk"
    assert steps_on(tmp_path / "disk") == [1, 2]


def test_a_run_whose_files_are_deleted_goes_on_there_as_the_same_tier(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        before = (tmp_path / "disk/run/tier.json").read_bytes()
        delete_run(tmp_path / "disk")
        for step in (2, 3):
            ckpt.save(step, state_of(step), block=True)
        (text,) = [text for text in texts() if "is gone from" in text]
        assert f"tier disk: the record of attempt 1 is gone from {tmp_path / 'disk'}" in text
        assert "Checkpoints that were deleted are lost there" in text
    assert (tmp_path / "disk/run/tier.json").read_bytes() == before
    assert steps_on(tmp_path / "disk") == [2, 3]


def test_a_start_that_found_the_emptied_tier_keeps_its_record(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    """An older process that still trains creates the record of its attempt again, but not that of the tier."""
    config, record = make_config(), tmp_path / "disk/run/tier.json"
    elsewhere = make_config(host={"folder": str(tmp_path / "memory of another")})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    with tierfall.open(config) as older:
        assert older.restore(blank()) is not None
        older.save(2, state_of(2), block=True)
        delete_run(tmp_path / "disk")
        with open_elsewhere(elsewhere) as newer:
            newer.save(10, state_of(10), block=True)
        before = record.read_bytes()
        older.save(3, state_of(3), block=True)
        assert any("is gone from" in text for text in texts())
        assert record.read_bytes() == before


def test_a_save_that_waits_for_a_lost_folder_repeats_why(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    """The tier is not reported as failing yet: ``max_wait`` is longer."""
    config = make_config(max_wait="4s")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        delete(tmp_path / "disk")
        with pytest.raises(tierfall.errors.FlushError, match="the tier's folder is gone"):
            ckpt.save(2, state_of(2), block=True)
    lines = [t for t in texts(logging.INFO) if t.startswith("save of step 2: waiting for")]
    assert any("disk fails: " in line and "the tier's folder is gone" in line for line in lines)


def test_memory_of_a_run_whose_tier_was_emptied_after_its_end_is_refused_with_the_ways_out(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    """As after a kill, too. A person may have deleted the run to begin anew, so that a person decides."""
    config = make_config(host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    delete(tmp_path / "disk")
    with pytest.raises(ConfigError) as caught:
        tierfall.open(config)
    arena = next(memory.rglob("*.arena"))
    assert f"{arena} holds 1@1" in str(caught.value)
    for text in ("To continue from them", "'tierfall drain'", "'tierfall drain --discard'"):
        assert text in str(caught.value)
    assert [str(owed.checkpoint) for owed in drain(load_config(config), 30.0).done] == ["1@1"]
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(state := blank()) is not None
        assert step_in(state) == 1


def test_a_shared_folder_that_is_lost_is_written_anew_once_it_is_forgotten(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    config = make_config(disk={}, far={"shared": True}, max_wait="1s")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        delete(tmp_path / "far")
        ckpt.save(2, state_of(2))
        wait_until(lambda: any("far" in text for text in texts()), "it is reported")
        assert "'tierfall forget'" in next(text for text in texts() if "far" in text)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="'tierfall forget far'"):
        ckpt.restore(blank())
    path = tmp_path / "tiers.yaml"
    path.write_text(json.dumps(config))
    assert CliRunner().invoke(app, ["forget", "far", "--config", str(path)]).exit_code == 0
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(state := blank()) is not None
        assert step_in(state) == 2
    assert 2 in steps_on(tmp_path / "far")
