"""Whatever holds training for more than a second is logged while it lasts, with what it waits for."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.stuck_tier import StuckTier

MiB = 1 << 20


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tierfall")


def config(root: Path, **disk: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "chunk": "64KiB",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / "memory"), "capacity": "5MiB"},
            {"name": "disk", "kind": "file", "path": str(root / "disk"), **disk},
        ],
    }


def state(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((MiB // 2,), float(step))}


def test_a_save_that_waits_for_memory_and_a_close_that_flushes_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = tierfall.open(config(tmp_path, bandwidth="1MB/s"))
    ckpt.restore(state(0))
    for step in (1, 2, 3):
        ckpt.save(step, state(step))
    lines = [m for m in caplog.messages if m.startswith("save of step 3: waiting for")]
    assert lines
    assert "no room in host (5 MiB) for 2.1 MiB; 1@1 to disk: " in lines[0]
    assert any(m.startswith("save of step 3: done after") for m in caplog.messages)
    ckpt.close()
    lines = [m for m in caplog.messages if m.startswith("close: waiting for")]
    assert any("to disk: " in line and " of 2.1 MiB" in line for line in lines)
    assert caplog.messages[-1] == "run r is closed; its newest checkpoint is 3@1, on disk"


def test_an_open_that_waits_for_a_tier_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierfall.open(config(tmp_path)):
        pass
    stuck = StuckTier(tmp_path / "disk", monkeypatch)
    stuck.hang_in("open")
    opener = threading.Timer(2.0, stuck.gate.set)
    opener.start()
    with tierfall.open(config(tmp_path)):
        assert "open: still waiting for an answer of disk" in caplog.messages


def test_what_takes_no_second_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(config(tmp_path)) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
    assert "waiting for" not in caplog.text
