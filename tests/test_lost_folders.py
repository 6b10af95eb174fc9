"""A tier's folder that goes away while training runs: the cause and the cure are logged, `close` says what is left and
where, and the next start restores that."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, open_elsewhere, state_of, step_in, steps_on
from tierfall.config import load_config
from tierfall.core.types.errors import ConfigError, RestoreError
from tierfall.ops.commands import forget
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


def delete_run(folder: Path) -> None:
    shutil.rmtree(folder / "run")


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


def test_memory_of_a_run_whose_tier_was_emptied_after_its_end_is_refused_with_the_ways_out(
    make_config: MakeConfig, tmp_path: Path, memory: Path
) -> None:
    """As after a kill, too. A person may have deleted the run to begin anew, so that a person decides."""
    config = make_config(host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    delete(tmp_path / "disk")
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="tierfall forget disk"):
        ckpt.restore(blank())
    forget(load_config(config), "disk")
    with pytest.raises(ConfigError) as caught:
        tierfall.open(config)
    folder = next(memory.rglob("*.image")).parent
    assert f"{folder}/slot-0.*.image holds 1@1" in str(caught.value)
    for text in ("To continue from them", "'tierfall drain'", "'tierfall drain --discard'"):
        assert text in str(caught.value)
    assert [str(owed.checkpoint) for owed in drain(load_config(config), 30.0).done] == ["1@1"]
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(state := blank()) is not None
        assert step_in(state) == 1


def test_waits_for_a_lost_tier_say_what_is_wrong_and_its_log_line_what_to_do(
    make_config: MakeConfig, tmp_path: Path, texts: Callable[..., list[str]]
) -> None:
    with tierfall.open(make_config(max_wait="2s")) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        delete(tmp_path / "disk")
        ckpt.save(2, state_of(2))
    told = [text for text in texts(logging.INFO) if "the tier's folder is gone" in text]
    waits = [text for text in told if text.startswith("close: ")]
    assert any("waiting for" in text for text in waits)
    assert any("accepts no copy" in text for text in waits)
    assert all(text.endswith("it was deleted, moved or unmounted") for text in waits)
    assert any("Mount it again, or move it back" in text for text in told)
