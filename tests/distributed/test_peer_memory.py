"""Jobs with peer memory: a node is lost with all that was in its memory, and the next start has everything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import ROOT, Job

PROGRAM = ROOT / "tests/distributed/peers_program.py"


@pytest.mark.parametrize("lost", range(4))
def test_one_of_four_nodes_is_lost(make_job: Callable[..., Job], tmp_path: Path, lost: int) -> None:
    train(make_job)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-{lost}")
    check_resumed(run_again(make_job), step=3)


def test_the_memory_of_two_machines_is_exchanged(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The ranks come to other machines than before: each finds what the others left there."""
    train(make_job)
    for kept in ("memory", "peers"):
        (tmp_path / f"{kept}-1").rename(tmp_path / "aside")
        (tmp_path / f"{kept}-2").rename(tmp_path / f"{kept}-1")
        (tmp_path / "aside").rename(tmp_path / f"{kept}-2")
    check_resumed(run_again(make_job), step=3)


def test_fewer_nodes_go_on(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A node is lost and not replaced: the others know all that it saved."""
    train(make_job)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-3")
    answers = make_job(3, [0, 1, 2], program=PROGRAM).run("resume_any")
    assert [answer.get("step") for answer in answers] == [3] * 3, answers
    assert all(answer["good"] and "pfs" not in answer["tiers"] for answer in answers)


def test_a_pair_that_is_lost_costs_the_steps_since_storage(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    train(make_job, pfs={"flush": {"every": 2}}, wait="pfs")
    for node in (0, 2):  # each keeps the other's images
        for kept in ("memory", "peers"):
            shutil.rmtree(tmp_path / f"{kept}-{node}")
    answers = run_again(make_job)
    check_resumed(answers, step=2, reads="pfs")


def test_a_node_that_is_lost_while_training_goes_on(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Its images are restored, also where the next start saves and is killed again, with another node lost."""
    train(make_job)
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start("train", steps=[4, 5])
    job.wait_ready()
    job.kill()
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-2")
    check_resumed(run_again(make_job), step=5)


def test_a_kill_in_mid_transfer_leaves_the_checkpoint_before(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM).start("train", steps=[1, 2, 3], stuck=3)
    job.wait_ready()
    job.kill()
    for kept in ("memory", "peers"):
        shutil.rmtree(tmp_path / f"{kept}-1")
    check_resumed(run_again(make_job), step=2)


def test_a_clean_close_frees_the_memory_of_all_nodes(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(4, [0, 1, 2, 3], program=PROGRAM)
    assert job.run("finish", steps=[1, 2], peers={"copies": 2}) == [2] * 4
    left = [path for node in range(4) for path in (tmp_path / f"peers-{node}").rglob("rank-*")]
    assert left == []
    answers = run_again(make_job)
    check_resumed(answers, step=2, reads="pfs")


def test_what_peer_memory_alone_has_stays_at_a_clean_close(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    run = make_job(4, [0, 1, 2, 3], program=PROGRAM).run
    assert run("finish", steps=[1, 2], at_end=False) == [2] * 4
    shutil.rmtree(tmp_path / "memory-1")
    shutil.rmtree(tmp_path / "peers-1")
    check_resumed(run_again(make_job), step=2)


def test_with_one_node_the_tier_is_left_out(make_job: Callable[..., Job], tmp_path: Path) -> None:
    answers = make_job(2, [0, 0], program=PROGRAM).run("finish", steps=[1, 2])
    assert answers == [2, 2]
    assert "there is one node, so tier peers is left out" in (tmp_path / "rank-0.log").read_text()
    assert not (tmp_path / "peers-0").exists()


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
