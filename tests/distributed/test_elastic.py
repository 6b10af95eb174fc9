"""Jobs that are started again: on the same node, with other ranks, on other nodes; and what each does with memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests import forked
from tests.distributed.job import ROOT, Job, SlurmJob

PROGRAM = Path(__file__).with_name("elastic_program.py")
MakeJob = Callable[..., Job]


@pytest.fixture
def start(make_job: MakeJob) -> MakeJob:
    return partial(make_job, program=PROGRAM)


def save_and_kill(job: Job, **arguments: Any) -> None:
    """Let all ranks save, and kill them all."""
    job.start("stay", **arguments)
    job.wait_ready()
    job.kill()


def slots_in_memory(folder: Path, node: int = 0) -> list[str]:
    found = (folder / f"memory-{node}/many").glob("*/slot-*.image")
    return sorted({path.name.partition(".")[0] for path in found})


def test_torchrun_starts_all_ranks_again_and_they_restore_from_memory(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(PROGRAM), "relaunched", f'{{"folder": "{tmp_path}"}}']
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(ROOT)}
    done = forked.run(command, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"answer-{rank}").read_text())
        assert (found["step"], found["good"], found["tiers"]) == (1, True, ["host"])
        assert [step for step, _, tiers in found["known"] if "pfs" in tiers] == [1, 2]
    assert not slots_in_memory(tmp_path), "all is durable: memory is given back"


@pytest.mark.parametrize(
    ("old", "new"),
    [(4, 2), *(pytest.param(*each, marks=pytest.mark.torture) for each in ((3, 1), (2, 4)))],
)
def test_what_was_in_memory_alone_is_restored_by_any_number_of_ranks_and_flushed_by_none(
    start: MakeJob, tmp_path: Path, old: int, new: int
) -> None:
    save_and_kill(start(old), steps=[1, 2], flush=False)
    assert not list(tmp_path.glob("*/many/step-*/commit.json"))
    answers = start(new).run("go_on", parts=old, steps=[3])
    for answer in answers:
        assert (answer["step"], answer["good"], answer["tiers"]) == (2, True, ["host"]), answer
        assert answer["left"] == []
        assert [step for step, _, tiers in answer["known"] if "pfs" in tiers] == [3]
    assert not list(tmp_path.glob("*/many/step-00000002-*")), "the next save is what lasts"
    assert tierfall.load(tmp_path / "pfs/many/step-00000003-a0002")["extra"] == {"step": 3}
    assert not slots_in_memory(tmp_path), "all is durable: memory is given back"


@pytest.mark.torture
def test_memory_of_ranks_that_are_gone_goes_once_something_newer_is_durable(
    start: MakeJob, tmp_path: Path
) -> None:
    save_and_kill(start(4), steps=[1])
    job = start(2).start("stay", parts=4, steps=[2])
    job.wait_ready()
    assert slots_in_memory(tmp_path) == ["slot-0", "slot-1"], "those of the ranks of now"
    job.kill()
    answers = start(2).run("go_on", parts=4, steps=[])
    assert [(a["step"], a["good"], a["tiers"]) for a in answers] == [(2, True, ["host"])] * 2


def test_fewer_nodes_restore_from_memory_and_the_shared_tier(
    start: MakeJob, tmp_path: Path
) -> None:
    save_and_kill(start(4, [0, 0, 1, 1]), steps=[1, 2])
    answers = start(2, [0, 0]).run("go_on", parts=4, steps=[3])
    for answer in answers:
        assert (answer["step"], answer["good"]) == (2, True), answer
        assert answer["tiers"] == ["host", "pfs"], "half of it is in the memory that is left"
    assert not slots_in_memory(tmp_path), "step 3 is durable"


@pytest.mark.torture
def test_what_only_missing_nodes_complete_stays_until_something_newer_is_durable(
    start: MakeJob, tmp_path: Path
) -> None:
    nodes = [0, 0, 1, 1]
    start(4, nodes).run("go_on", parts=4, steps=[])
    save_and_kill(start(4, nodes), steps=[1])
    save_and_kill(start(4, nodes), steps=[2], flush=False)
    answers = start(2, [0, 0]).run("go_on", parts=4, steps=[])
    assert [answer["step"] for answer in answers] == [1, 1], "the older one, of which all is there"
    job = start(2)
    assert "is in memory, the others' are not" in job.log(0)
    assert slots_in_memory(tmp_path) == ["slot-0", "slot-1"]
    back = start(4, nodes).run("go_on", parts=4, steps=[3])
    assert [(a["step"], a["good"], a["tiers"]) for a in back] == [(2, True, ["host"])] * 4


def test_a_requeued_slurm_job_goes_on_from_memory(start: MakeJob, tmp_path: Path) -> None:
    save_and_kill(start(2, None, SlurmJob), steps=[1, 2], flush=False)
    again = start(2, None, SlurmJob)
    again.restarts = 1  # type: ignore[attr-defined]
    answers = again.run("go_on", parts=2, steps=[3])
    for answer in answers:
        assert (answer["step"], answer["good"], answer["tiers"]) == (2, True, ["host"])
        assert [step for step, _, tiers in answer["known"] if "pfs" in tiers][-2:] == [2, 3]
