"""Several ranks save and load by path, with torch.distributed.checkpoint as it is: one checkpoint of all, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("path_program.py")


def test_files_of_all_ranks_are_one_checkpoint(make_job: Callable[..., Job]) -> None:
    answers = make_job(3, program=PROGRAM).run("train", saves=[1, 2])
    assert [answer["read back"] for answer in answers] == [True] * 3, answers
    names = [f"many/step-00000002/{name}" for name in (".metadata", *DATA)]
    assert [answer["files"] for answer in answers] == [names] * 3
    # dcp.save has returned, so the fastest stored tier has it: rank 0, which committed it, lists it at once.
    assert answers[0]["whole"][-1][2]["nvme"] == "committed"


DATA = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")


@pytest.mark.torture
def test_a_start_that_loads_by_path_goes_on_from_there(make_job: Callable[..., Job]) -> None:
    # Each node's disk is its own: what other ranks wrote is read from the tier that all see.
    first = make_job(2, [0, 1], program=PROGRAM).run(
        "train", saves=[10, 20], nvme={"flush": {"every": 9}}
    )
    assert [answer["read back"] for answer in first] == [True, True], first
    back = make_job(2, [0, 1], program=PROGRAM).run(
        "train", saves=[15, 20], load=10, nvme={"flush": {"every": 9}}
    )
    assert [answer["loaded"] for answer in back] == [True, True], back
    assert [answer["read back"] for answer in back] == [True, True]
    assert [[step, attempt] for step, attempt, _ in back[0]["whole"]][-2:] == [[15, 2], [20, 2]]
    (alone,) = make_job(1, program=PROGRAM).run("train", saves=[], load=20)
    assert alone["loaded"] is True, alone


@pytest.mark.torture
def test_saving_in_a_thread_keeps_what_the_state_was(make_job: Callable[..., Job]) -> None:
    assert make_job(2, program=PROGRAM).run("save_in_thread") == [True, True]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.torture), 2])
def test_a_child_process_saves_by_the_configuration(
    make_job: Callable[..., Job], tmp_path: Path, ranks: int
) -> None:
    config = write_config(tmp_path)
    answers = make_job(ranks, program=PROGRAM).run("save_in_process", config=config)
    assert answers == [{"filled": [True, True], "error": ""}] * ranks


@pytest.mark.torture
def test_a_child_process_does_not_fence_its_parent(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    (answer,) = make_job(1, program=PROGRAM).run("save_in_process", config=config, open_here=True)
    assert "THREAD" in answer["error"], answer
    assert "LockError" in answer["error"]


def write_config(folder: Path) -> str:
    path = folder / "tiers.yaml"
    tiers = [
        {"name": "host", "kind": "host", "folder": str(folder / "memory")},
        {"name": "pfs", "kind": "file", "path": str(folder / "pfs"), "shared": True},
    ]
    path.write_text(
        json.dumps({"run": "many", "max_wait": "20s", "chunk": "64KiB", "tiers": tiers})
    )
    return str(path)


@pytest.mark.torture
def test_one_rank_saves_for_all(make_job: Callable[..., Job]) -> None:
    assert make_job(2, program=PROGRAM).run("alone_saves", saver=1) == [7.0, 7.0]


def test_what_one_rank_cannot_write_is_saved_by_none(make_job: Callable[..., Job]) -> None:
    answers = make_job(2, program=PROGRAM).run("one_fails")
    assert all("no space left" in answer["error"] for answer in answers), answers
    assert [(a["staged"], a["exists"], a["again"]) for a in answers] == [(False, False, True)] * 2
