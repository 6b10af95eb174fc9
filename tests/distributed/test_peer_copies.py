"""Jobs with peer memory of several copies: as many nodes as that may be lost, and no more is read from storage."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.job import stopped, wait_for
from tests.distributed.peer_jobs import PROGRAM, MakeJob


def test_a_node_that_stands_still_in_a_transfer_is_waited_for_by_its_copies_alone(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Training goes on, the handle says why, and the tier catches up once the node goes on."""
    job = make_job(2, [0, 1], program=PROGRAM).start(
        "outlast", max_wait="60s", peers={"max_wait": "2s"}
    )
    wait_for(job, tmp_path / "sending")
    with stopped(job, 1):
        wait_for(job, tmp_path / "behind")
    answers = job.wait()
    assert answers[0]["blocked_s"] < 5, answers
    assert "flush of 2@1 to peers failed and is still being tried" in answers[0]["why"]
    assert "timed out" in answers[0]["why"]


def test_a_copy_that_does_not_fit_says_how_much_is_lacking(
    make_job: MakeJob, tmp_path: Path
) -> None:
    answers = make_job(2, [0, 1], program=PROGRAM).run("short_of_memory", on=1, free=50_000)
    lacks = r"it needs [\d.]+ KiB \(\d+ bytes\), and 48.8 KiB \(50000 bytes\) are free for it on"
    assert re.search(lacks, answers[0]["why"]), answers
    assert [answer["stored"] for answer in answers] == [[1, 2], [1, 2]]
