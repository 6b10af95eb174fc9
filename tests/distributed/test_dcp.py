"""torch.distributed.checkpoint on several ranks: DCP says who writes what, and the whole is one checkpoint, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

MakeJob = Callable[..., Job]
PROGRAM = Path(__file__).with_name("dcp_program.py")
LONG = pytest.mark.torture


def run(job: Job, function: str, **arguments: Any) -> list[Any]:
    """Run one job; each start has a store of its own."""
    answers = job.run(function, timeout_s=180, **arguments)
    assert all(not isinstance(a, dict) or "error" not in a for a in answers), answers
    return answers


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """``straight(ranks)``: what each rank comes to in four steps without a break."""

    @cache
    def digests(ranks: int) -> list[str]:
        job = Job(tmp_path_factory.mktemp("straight"), ranks, program=PROGRAM)
        answers = run(job, "train", layout="fsdp", steps=4, save=False)
        return [answer["digest"] for answer in answers]

    return digests


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        pytest.param("cached", 2, marks=LONG),
        pytest.param("lazy", 2, marks=LONG),
        pytest.param("beside", 2, marks=LONG),
        pytest.param("process", 2, marks=LONG),
        pytest.param("no_dist", 2, marks=LONG),
        pytest.param("thread", 2, marks=LONG),
    ],
)
def test_training_goes_on_to_the_same_bits(
    make_job: MakeJob, straight: Callable[[int], list[str]], how: str, ranks: int, tmp_path: Path
) -> None:
    """``beside``: with a group of its own, ``async_save`` goes on while a step is trained. On the default group it has
    a warning: ``lazy``, where the Checkpointer alone has another one, and ``thread``, on ``cpu:gloo``."""

    def train(**arguments: Any) -> list[Any]:
        return run(make_job(ranks, program=PROGRAM), "train", layout="fsdp", **arguments)

    saved = train(steps=2, how=how)
    assert [answer["first"] for answer in saved] == [1] * ranks
    assert [answer["lazy"] for answer in saved] == [int(how in ("lazy", "beside"))] * ranks
    log = (tmp_path / "rank-0.log").read_text()
    assert log.count("the training use one gloo group") == (how in ("lazy", "thread"))
    stored = ["nvme", "pfs"]
    assert saved[0]["tiers"][-1] == [2, stored if how == "process" else ["host", *stored]]
    resumed = train(steps=2, how=how)
    assert [answer["first"] for answer in resumed] == [3] * ranks
    assert [answer["digest"] for answer in resumed] == straight(ranks)


def test_what_a_process_of_dcp_wrote_is_loaded_to_the_same_bits(make_job: MakeJob) -> None:
    words = {"layout": "plain", "how": "process"}
    (saved,) = run(make_job(1, program=PROGRAM), "train", steps=1, **words)
    assert saved["tiers"] == [[1, ["nvme", "pfs"]]], "it is not in this process's memory"
    (loaded,) = run(make_job(1, program=PROGRAM), "train", steps=0, **words)
    assert (loaded["first"], loaded["digest"]) == (2, saved["digest"])


@pytest.mark.torture
def test_a_group_that_is_not_the_checkpointers_is_refused(make_job: MakeJob) -> None:
    answers = run(make_job(3, program=PROGRAM), "part_of_the_ranks")
    assert all("2 ranks save, and the Checkpointer was opened by 3" in a for a in answers[:2])
    assert answers[2] == ""
