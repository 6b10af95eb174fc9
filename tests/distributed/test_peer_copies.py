"""Jobs with peer memory of several copies: as many nodes as that may be lost, and no more is read from storage."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.distributed.job import stopped, wait_for
from tests.distributed.peer_jobs import (
    NODES,
    PROGRAM,
    MakeJob,
    check_resumed,
    lose,
    run_again,
    train,
)

PAIRS = list(combinations(NODES, 2))
SEED = 21
QUICK = Random(SEED).sample(PAIRS, 2)
TWO = {"copies": 2}


def test_a_copy_with_flipped_bytes_is_not_used(make_job: MakeJob, tmp_path: Path) -> None:
    """The other one is, and the log says so. If both are damaged, the step before is restored: from memory where it is
    there still."""
    train(make_job, peers=TWO)
    lose(tmp_path, 0)
    shutil.copytree(tmp_path, tmp_path.with_name("aside"))
    first, second = copies_of(tmp_path, rank=0)
    flip(first)
    answers = run_again(make_job, peers=TWO)
    check_resumed(answers, step=3)
    assert answers[0]["tiers"].keys() == {"host"}
    (told,) = [
        text
        for text in (tmp_path / "rank-0.log").read_text().splitlines()
        if "not brought back" in text
    ]
    assert "digest" in told

    shutil.rmtree(tmp_path)
    shutil.move(tmp_path.with_name("aside"), tmp_path)
    for each in (first, second):
        flip(each)
    answers = run_again(make_job, peers=TWO)
    assert [(answer.get("step"), answer.get("good")) for answer in answers] == [(2, True)] * 4
    assert "step 3" in skipped(answers)
    assert "digest" in skipped(answers)


def test_a_node_that_stands_still_in_a_transfer_is_waited_for_by_its_copies_alone(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Training goes on, the handle says why, and the tier catches up once the node goes on."""
    job = make_job(2, [0, 1], program=PROGRAM).start(
        "outlast", max_wait="30s", peers={"max_wait": "4s"}
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
    assert "it needs 142 KiB (145540 bytes)" in answers[0]["why"], answers
    assert "48.8 KiB (50000 bytes) are free for it on" in answers[0]["why"]
    assert [answer["stored"] for answer in answers] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"peers": TWO}, "copies of tier peers differs: rank 0 has '1', rank 2 has '2'"),
        (
            {"without": "peers"},
            "the chain of tiers differs: rank 0 has 'host (host), peers (peer),",
        ),
    ],
)
def test_nodes_whose_tiers_differ_are_named(
    make_job: MakeJob, differs: dict[str, Any], says: str
) -> None:
    job = make_job(3, [0, 1, 2], program=PROGRAM)
    for rank in range(3):
        job.start_rank(rank, "resume", **(differs if rank == 2 else {}))
    answers = job.wait()
    assert all(says in answer["text"] for answer in answers), answers


def skipped(answers: list[Any]) -> str:
    return "\n".join(text for answer in answers for text in answer["skipped"])


def copies_of(folder: Path, *, rank: int) -> list[Path]:
    """The files of the newest image of a rank in other nodes' memory."""
    found = sorted(folder.glob(f"peers-*/*/*/many/step-*/rank-{rank:05d}-*.safetensors"))
    newest = max(path.parent.name for path in found)
    return [path for path in found if path.parent.name == newest]


def flip(path: Path) -> None:
    """Change a byte in the middle of each quarter, so that each chunk but the header is damaged."""
    data = bytearray(path.read_bytes())
    for part in range(8):
        data[len(data) * (2 * part + 1) // 16] ^= 1
    path.write_bytes(data)
