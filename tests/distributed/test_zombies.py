"""A rank of an earlier start that comes back to life changes nothing of what a newer start has committed."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job

ELSEWHERE = [5, 5]
"""The newer start is on other nodes: on the same ones the lock on a slot of memory keeps it out."""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.torture), 1])
def test_a_rank_that_was_stopped_in_mid_flush_finds_itself_fenced(
    make_job: Callable[..., Job], tmp_path: Path, victim: int
) -> None:
    make_job(2).run("train", steps=[1])
    old = make_job(2).start("train", steps=[2], victim=victim, point="flush", call=1, stop=True)
    stopped = old.processes[victim].pid
    _wait_until_stopped(stopped)

    new = make_job(2, ELSEWHERE).run("train", steps=[2, 3])
    assert new == [1, 1]
    committed = _contents(tmp_path / "pfs")
    os.kill(stopped, signal.SIGCONT)
    for answer in old.wait():
        assert answer["error"] in ("FencedError", "FlushError")
        assert "attempt 2 " in answer["text"]
        assert "attempt 3 " in answer["text"]
    after = _contents(tmp_path / "pfs")
    assert {key: after.get(key) for key in committed} == committed
    assert "step-00000002-a0002/commit.json" not in after
    assert (
        make_job(2, ELSEWHERE).run("restore") == [{"step": 3, "good": True, "tiers": ["nvme"]}] * 2
    )


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "it never came there"
        time.sleep(0.05)


def _contents(tier: Path) -> dict[str, str]:
    """Every file of the run on a tier that a start has finished, with its digest."""
    root = tier / "many"
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
        and ("a0002" not in str(path) or path.name == "commit.json")
        and path.name != "latest"
    }
