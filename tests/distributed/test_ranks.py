"""Several ranks save and restore one run: one checkpoint, or none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job

MakeJob = Callable[..., Job]
TWO_NODES = [0, 0, 1, 1]


def test_a_replaced_node_reads_from_where_its_shards_are_left(
    make_job: MakeJob, tmp_path: Path
) -> None:
    make_job(4, TWO_NODES).run("save", steps=[1, 2])
    shutil.rmtree(tmp_path / "nvme-1")
    restored = make_job(4, TWO_NODES).run("restore")
    assert restored == [
        {"step": 2, "good": True, "tiers": ["nvme" if node == 0 else "pfs"]} for node in TWO_NODES
    ]


@pytest.mark.parametrize("when", ["sealed", "nvme", "pfs"])
def test_a_job_that_is_killed_goes_on_from_memory(
    make_job: MakeJob, tmp_path: Path, when: str
) -> None:
    _run_and_kill(make_job(2), tmp_path, steps=[1, 2], when=when)
    restored = make_job(2).run("restore")
    assert restored == [{"step": 2, "good": True, "tiers": ["host"]}] * 2
    assert (tmp_path / "pfs/many/step-00000002-a0001/commit.json").exists(), "its flush is finished"


def test_memory_of_one_rank_alone_is_no_checkpoint(make_job: MakeJob, tmp_path: Path) -> None:
    _run_and_kill(make_job(2), tmp_path, steps=[1, 2], when="pfs")
    next(tmp_path.glob("memory-0/many/*/slot-1.arena")).unlink()
    restored = make_job(2).run("restore")
    tiers = [["host"], ["nvme"]]
    assert restored == [{"step": 2, "good": True, "tiers": t} for t in tiers]


def test_a_rank_whose_disk_is_full_gives_up_that_tier_for_all(
    make_job: MakeJob, tmp_path: Path
) -> None:
    answers = make_job(2).run("refused", full=1)
    assert all("rank 1" in answer and "the disk is full" in answer for answer in answers), answers
    assert not list((tmp_path / "nvme-0/many").glob("step-*/*")), "what rank 0 had brought is gone"


def _run_and_kill(job: Job, folder: Path, *, steps: list[int], when: str) -> None:
    """Let a job come to where all ranks are ready, and kill them all."""
    job.start("die", steps=steps, when=when)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < job.world_size:
        assert time.monotonic() < deadline, job.log(0)
        time.sleep(0.05)
    job.kill()


def test_close_flushes_the_last_step_to_every_tier_though_it_was_sealed_just_now(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """A rank that does not know yet that all ranks have sealed it owes the tiers no less."""
    make_job(2, [0, 1]).run("finish", steps=[1, 2], pfs={"flush": {"every": 100}})
    assert "still owed" not in (tmp_path / "rank-0.log").read_text()
    assert (tmp_path / "pfs/many/step-00000002-a0001/commit.json").exists()
