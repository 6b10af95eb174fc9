"""A run that finds no checkpoint names the other runs on its tiers: its name may have been changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, state_of

MakeConfig = Callable[..., dict[str, Any]]


def train(config: dict[str, Any], run: str, *steps: int) -> None:
    with tierfall.open({**config, "run": run}) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


def warning_of(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Return what a restore that finds nothing warns of."""
    caplog.clear()
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(blank()) is None
    found = [r.getMessage() for r in caplog.records if "Other runs" in r.getMessage()]
    assert len(found) <= 1
    return "".join(found)


def test_a_renamed_run_is_told_which_runs_there_are(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``far`` has every second checkpoint. The newest on any tier counts."""
    config = make_config(disk={}, far={"flush": {"every": 2}})
    assert warning_of({**config, "run": "alone"}, caplog) == ""
    for number, run in enumerate(("first", "second", "third", "fourth")):
        train(config, run, 10 * number + 1, 10 * number + 2, 10 * number + 3)
        for tier in ("disk", "far"):
            latest = tmp_path / tier / run / "latest"
            os.utime(latest, (number, number))
    for number in range(3):
        (tmp_path / "disk" / f"notes{number}").mkdir()
        (tmp_path / "disk" / f"notes{number}" / "latest").write_text("of another program")
    os.mkfifo(tmp_path / "disk" / "fifo")
    found = warning_of({**config, "run": "renamed"}, caplog)
    assert "no tier has a checkpoint of run 'renamed', and training begins anew" in found
    assert "fourth (newest 33@1), third (newest 23@1)" in found
    assert "first" not in found
    assert "give its name as 'run'" in found
    levels = [r.levelno for r in caplog.records if r.getMessage() == found]
    assert levels == [logging.WARNING]
