"""Jobs with peer memory: a node is lost with all that was in its memory, and the next start has everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import ROOT, Job
from tests.distributed.peer_jobs import shown
from tests.steps import wait_until

PROGRAM = ROOT / "tests/distributed/peers_program.py"
LONG = pytest.mark.torture


def test_fewer_nodes_go_on(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A node is lost and not replaced: the others know all that it saved."""
    train(make_job)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-3")
    answers = make_job(3, [0, 1, 2], program=PROGRAM).run("resume_any")
    assert [answer.get("step") for answer in answers] == [3] * 3, answers
    assert all(answer["good"] and "pfs" not in answer["tiers"] for answer in answers)


def test_a_node_that_is_lost_while_training_goes_on(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Its images are restored, also where the next start saves and is killed again, with another node lost. What is
    said of the loss of nodes is of checkpoints that this start has committed in peer memory."""
    train(make_job)
    check_survival(tmp_path, step=3, attempt=1)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start("train", steps=[4, 5])
    job.wait_ready()
    wait_until(lambda: "peers: 5@2" in shown(tmp_path, "watch", "--once"), "the status has step 5")
    pairs = "peers: 5@2 survives the loss of any 1 node; of 2 with 66.6%"
    for command in (["ls"], ["watch", "--once"]):
        assert pairs in shown(tmp_path, *command).splitlines()
    job.kill()
    check_survival(tmp_path, step=5, attempt=2)
    for command in (["ls"], ["watch", "--once"]):
        assert f"{pairs} (if no node is lost yet)" in shown(tmp_path, *command).splitlines()
        document = json.loads(shown(tmp_path, *command, "--json"))
        assert document["peer_survival"] == survival(step=5, attempt=2)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-2")
    check_resumed(run_again(make_job), step=5)


def test_the_node_that_is_left_flushes_what_it_keeps_of_a_lost_one(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """No trainer starts again: a command drains the memory of the other node to storage."""
    job = make_job(2, [0, 1], program=PROGRAM).start("train", steps=[1])
    job.wait_ready()
    job.kill()
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    assert "flushed 1@1 to pfs" in shown(tmp_path, "drain", "--deadline", "20s")
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-0")
    answers = make_job(2, [0, 1], program=PROGRAM).run("resume")
    check_resumed(answers, step=1, reads="pfs")


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


def test_a_kill_in_mid_transfer_leaves_the_checkpoint_before(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start(
        "train", steps=[1, 2, 3], stuck=3, after=[4]
    )
    job.wait_ready()
    job.kill()
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    check_resumed(run_again(make_job), step=2)


def test_what_peer_memory_alone_has_stays_at_a_clean_close(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    run = make_job(4, [0, 1, 2, 3], program=PROGRAM).run
    assert run("finish", steps=[1, 2], at_end=False) == [2] * 4
    shutil.rmtree(tmp_path / "memory-1")
    shutil.rmtree(tmp_path / "peers-1")
    check_resumed(run_again(make_job), step=2)


def test_storage_that_was_deleted_is_forgotten_by_what_nodes_keep(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(2, [0, 1], program=PROGRAM)
    job.start("train", steps=[1, 2], wait="pfs", pfs={"flush": {"every": 2}})
    job.wait_ready()
    job.kill()
    shutil.rmtree(tmp_path / "pfs")
    for node in (0, 1):
        answer = shown(tmp_path, "forget", "pfs", node=node)
        assert "pfs is forgotten by peers, this machine" in answer
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


def survival(*, step: int, attempt: int) -> dict[str, Any]:
    """What two pairs of nodes survive: 2 of the 6 losses of two nodes are of a pair."""
    chances = [
        {"losses": losses, "probability": probability, "exact": True}
        for losses, probability in enumerate([1.0, 4 / 6, 0.0, 0.0], start=1)
    ]
    return {"tier": "peers", "step": step, "attempt": attempt, "certain": 1, "chances": chances}


def check_survival(folder: Path, *, step: int, attempt: int) -> None:
    """``statistics`` said nothing before the first save of a start, and at its end that each pair may lose one."""
    found = [json.loads((folder / f"survives-{rank}").read_text()) for rank in range(4)]
    assert found == [[None, survival(step=step, attempt=attempt)]] * 4


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
