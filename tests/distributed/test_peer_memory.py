"""Jobs with peer memory: a node is lost with all that was in its memory, and the next start has everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.job import ROOT, Job
from tests.distributed.peer_jobs import shown

PROGRAM = ROOT / "tests/distributed/peers_program.py"


def test_the_example_loses_a_node_and_reads_nothing_from_storage() -> None:
    command = [sys.executable, str(ROOT / "examples/lose_a_node.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == [f"node {node}: peer memory has step 5" for node in (0, 1)]
    assert lines[2] == "node 1 is lost, with all that was in its memory"
    assert all(": step 5 from " in line and "disk" not in line for line in lines[3:5]), (
        done.stdout + done.stderr
    )
    assert sorted(lines[5:]) == [f"node {node}: peer memory has step 10" for node in (0, 1)]


def test_what_peer_memory_alone_has_stays_at_a_clean_close(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    run = make_job(4, [0, 1, 2, 3], program=PROGRAM).run
    assert run("finish", steps=[1, 2], at_end=False) == [2] * 4
    shutil.rmtree(tmp_path / "memory-1")
    shutil.rmtree(tmp_path / "peers-1")
    check_resumed(run_again(make_job), step=2)


def test_storage_that_was_deleted_is_forgotten_by_each_node(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, [0, 1], program=PROGRAM)
    job.start("train", steps=[1, 2], wait="pfs", pfs={"flush": {"every": 2}})
    job.wait_ready()
    job.kill()
    shutil.rmtree(tmp_path / "pfs")
    for node in (0, 1):
        answer = shown(tmp_path, "forget", "pfs", node=node)
        assert "pfs is forgotten by this machine" in answer
    check_resumed(make_job(2, [0, 1], program=PROGRAM).run("resume"), step=2)


def test_what_a_node_keeps_is_nobody_elses_to_read(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    train(make_job)
    assert all((tmp_path / f"peers-{node}").stat().st_mode & 0o077 == 0 for node in range(4))


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "peers-2").touch()
    answers = run_again(make_job)
    assert all("rank 2: tier peers: " in answer["text"] for answer in answers), answers


def run_again(make_job: Callable[..., Job]) -> list[Any]:
    return make_job(4, [0, 1, 2, 3], program=PROGRAM).run("resume")


def train(make_job: Callable[..., Job], **given: Any) -> None:
    """Save steps 1 to 3 on four nodes, until peer memory has them, and kill all."""
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start("train", steps=[1, 2, 3], **given)
    job.wait_ready()
    job.kill()


def check_resumed(answers: list[Any], *, step: int, reads: str = "") -> None:
    """All ranks restored that step, bit for bit, and from storage only where that is said."""
    assert [answer.get("step") for answer in answers] == [step] * len(answers), answers
    assert all(answer["good"] for answer in answers)
    read = set().union(*(answer["tiers"] for answer in answers))
    assert ("pfs" in read) == bool(reads)
