"""Several ranks save and restore one run: one checkpoint, or none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tierfall
from tests.distributed.job import Job

MakeJob = Callable[..., Job]
TWO_NODES = [0, 0, 1, 1]


@pytest.mark.parametrize("nodes", [[0, 0], TWO_NODES])
def test_what_all_ranks_save_all_ranks_restore(
    make_job: MakeJob, tmp_path: Path, nodes: list[int]
) -> None:
    saved = make_job(len(nodes), nodes).run("save", steps=[1, 2, 3])
    last = [3, 1, ["host", "nvme", "pfs"]]
    assert [answer[-1] for answer in saved] == [last] * len(nodes)
    folder = tmp_path / "pfs" / "many" / "step-00000003-a0001"
    assert len(list(folder.glob("rank-*.safetensors"))) == len(nodes)
    restored = make_job(len(nodes), nodes).run("restore")
    assert restored == [{"step": 3, "good": True, "tiers": ["nvme"]}] * len(nodes)


def test_a_first_start_restores_nothing_on_any_rank(make_job: MakeJob) -> None:
    assert make_job(2).run("restore") == [None, None]


def test_a_replaced_node_reads_from_where_its_shards_are_left(
    make_job: MakeJob, tmp_path: Path
) -> None:
    make_job(4, TWO_NODES).run("save", steps=[1, 2])
    shutil.rmtree(tmp_path / "nvme-1")
    restored = make_job(4, TWO_NODES).run("restore")
    assert restored == [
        {"step": 2, "good": True, "tiers": ["nvme" if node == 0 else "pfs"]} for node in TWO_NODES
    ]


def test_a_shard_that_is_nowhere_is_named_and_nothing_begins_anew(
    make_job: MakeJob, tmp_path: Path
) -> None:
    make_job(4, TWO_NODES).run("save", steps=[1])
    shutil.rmtree(tmp_path / "nvme-1")
    for step in (tmp_path / "pfs").glob("*/step-*"):
        shutil.rmtree(step)
    for named in (tmp_path / "pfs").glob("*/latest"):
        named.unlink()
    for answer in make_job(4, TWO_NODES).run("restore"):
        assert answer["error"] == "RestoreError"
        assert "ranks 2, 3 of 4" in answer["text"]


def test_a_damaged_shard_of_one_rank_takes_all_ranks_to_the_older_step(
    make_job: MakeJob, tmp_path: Path
) -> None:
    make_job(2).run("save", steps=[1, 2])
    for image in tmp_path.glob("*/many/step-00000002-a0001/rank-00001-of-00002.safetensors"):
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.write_bytes(data)
    restored = make_job(2).run("restore")
    assert restored == [{"step": 1, "good": True, "tiers": ["nvme"]}] * 2


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


def test_what_each_rank_has_for_itself_is_named_where_their_number_changes(
    make_job: MakeJob, tmp_path: Path
) -> None:
    make_job(4, TWO_NODES).run("save", steps=[1])
    for answer in make_job(2).run("restore"):
        assert answer["error"] == "RestoreError"
        assert "extra: differs between the ranks that saved it" in answer["text"]
        assert "weights.w0" in answer["text"]
    shard = tmp_path / "pfs/many/step-00000001-a0001/rank-00001-of-00004.safetensors"
    assert tierfall.load(shard)["extra"] == {"step": 1, "rank": 1}


def test_a_save_that_only_one_rank_calls_is_reported_and_does_not_hang(make_job: MakeJob) -> None:
    answers = make_job(2).run("save_alone", only=1, max_wait="3s")
    outcome, text = answers[1]["said"]
    assert outcome == "failed"
    assert "rank 0 did not save step 1" in text
    (one,), (other,) = (answer["steps"] for answer in answers)
    assert one == other, "both count alike again, and what they save is a checkpoint"
    restored = make_job(2).run("restore")
    assert [(answer["step"], answer["good"]) for answer in restored] == [(one, True)] * 2


def test_a_state_that_one_rank_cannot_save_gives_up_the_step_for_all(make_job: MakeJob) -> None:
    answers = make_job(2).run("bad_state", bad=1)
    assert answers[1]["said"][0] == "raised"
    outcome, text = answers[0]["said"]
    assert outcome == "failed"
    assert "rank 1" in text
    assert "function" in text, "it names what could not be saved"
    assert [answer["steps"] for answer in answers] == [[2], [2]]


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
