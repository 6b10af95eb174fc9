"""ranks of a job without training load together: each byte is read once, and a rank that dies ends it for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("loads_program.py")
COUNT, TENSOR_BYTES, HEADER = 64, 50_000, 64 << 10


@pytest.fixture
def job(make_job: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """Jobs on two nodes, for which a checkpoint is saved."""
    make = partial(make_job, program=PROGRAM)
    make(1).run("save_tensors", count=COUNT, tensor_bytes=TENSOR_BYTES)
    (tmp_path / "end").touch()
    return partial(make, 4, [0, 0, 1, 1])


def test_all_ranks_read_one_copy_of_the_checkpoint(job: Callable[..., Job]) -> None:
    ways: list[dict[str, Any]] = [{}, {"share": True}, {"share": True, "part": 2}]
    for how, answers in zip(ways, zip(*job().run("load_in", ways=ways), strict=True), strict=True):
        assert [answer.get("good") for answer in answers] == [True] * 4, answers
        assert {answer["tensors"] for answer in answers} == {COUNT // how.get("part", 1)}
        read = sum(answer["read"] for answer in answers)
        assert COUNT * TENSOR_BYTES <= read <= COUNT * TENSOR_BYTES + 2 * HEADER


def test_ranks_that_are_at_different_loads_fail_together_once(job: Callable[..., Job]) -> None:
    answers = job().run("load_in", ways=[{}, {}], failing=2)
    for failed, good in answers:
        assert failed["error"] == "RanksError", failed
        assert "ranks 0, 1, 3 made fewer loads" in failed["text"]
        assert good["good"]


@pytest.mark.torture
@pytest.mark.parametrize(("share", "victims"), [(True, [2, 3]), (False, [0])])
def test_ranks_that_die_end_the_load_of_all(
    job: Callable[..., Job], share: bool, victims: list[int]
) -> None:
    answers = job().run("load", group=True, share=share, victims=victims, max_wait="15s")
    for rank, answer in enumerate(answers):
        if rank in victims:
            assert answer == {"exit": -9}
        else:
            assert answer["error"] in ("RanksError", "RestoreError"), answer
            assert "load of 1@1: " in answer["text"]
