"""Jobs with peer memory: a node is lost with all that was in its memory, and the next start has everything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import ROOT, Job

PROGRAM = ROOT / "tests/distributed/peers_program.py"


@pytest.mark.parametrize("lost", range(4))
def test_one_of_four_nodes_is_lost(
    make_job: Callable[..., Job], tmp_path: Path, lost: int
) -> None:
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start("train", steps=[1, 2, 3])
    job.wait_ready()
    job.kill()
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-{lost}")
    answers = make_job(4, [0, 1, 2, 3], program=PROGRAM).run("resume")
    assert [answer.get("step") for answer in answers] == [3] * 4, answers
    assert all(answer["good"] for answer in answers)
    assert all("pfs" not in answer["tiers"] for answer in answers)
