"""Real processes save by a cadence of rank 0's, by a signal to one of them, and at the end: all the same steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("cadence_program.py")
STEPS = 800


@pytest.mark.parametrize("measure", [{"overhead": "10%"}, {"every": "1s"}])
def test_all_processes_save_the_same_steps(
    make_job: Callable[..., Job], measure: dict[str, Any], tmp_path: Path
) -> None:
    interval = {**measure, "on_signal": ["SIGUSR1"], "at_end": True}
    job = make_job(3, [0, 0, 1], program=PROGRAM)
    answers = job.run("train", steps=STEPS, signalled=2, at_step=500, interval=interval)
    assert all("saved" in answer for answer in answers), (answers, job.log(0))
    saved = answers[0]["saved"]
    assert len(saved) >= 2
    assert any(step >= 500 for step in saved), "the signal's"
    assert [answer["saved"] for answer in answers] == [saved] * 3
    expected = [*saved, *([STEPS] if saved[-1] != STEPS else [])]
    records = sorted((tmp_path / "pfs" / "many").glob("step-*/commit.json"))
    assert [int(record.parent.name.split("-")[1]) for record in records] == expected
    assert answers[0]["reason"] != "rank 0 decides"
    assert {answer["reason"] for answer in answers[1:]} == {"rank 0 decides"}
