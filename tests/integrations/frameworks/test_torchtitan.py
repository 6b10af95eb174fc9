"""A Trainer of TorchTitan that saves to tierfall: killed, it resumes exactly, and the fields of its manager are honoured."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.distributed.job import Job

pytest.importorskip("torchtitan")

PROGRAM = Path(__file__).with_name("torchtitan_program.py")
ROOT = PROGRAM.parents[3]
STEPS, EVERY = 24, 4
INSIDE = ("capture", "seal", "sealed", "flush", "published", "landed", "commit")

Start = Callable[..., Job]


@pytest.fixture
def start(make_job: Callable[..., Job], tmp_path: Path, memory: Path) -> Start:
    """``start(name, ranks, ...)`` starts a training in the folder ``name``, which has a memory of its own."""

    def begin(name: str, ranks: int = 1, **more: Any) -> Job:
        job = make_job(tmp_path / name, PROGRAM, ranks)
        return job.start("train", memory=str(memory / name), **more)

    return begin


def train(start: Start, name: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Train to the end; return what rank 0 does."""
    job = start(name, ranks, **more)
    answer: dict[str, Any] = job.wait(200)[0]
    assert "exit" not in answer, job.log(0)
    return answer


def losses(folder: Path, life: str, rank: int = 0) -> dict[int, str]:
    path = folder / f"{life}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def kill_at_random(job: Job, life: str, drawn: random.Random) -> None:
    """Kill all ranks some time after a loss."""
    count, delay_s = drawn.randint(6, 18), drawn.uniform(0, 0.1)
    deadline = time.monotonic() + 150
    while len(losses(job.folder, life)) < count:
        assert time.monotonic() < deadline, job.log(0)
        assert all(process.poll() is None for process in job.processes), job.log(0)
        time.sleep(0.002)
    time.sleep(delay_s)
    job.kill()


# Killed, and started again -------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_loss_after_a_kill_is_that_of_an_uninterrupted_run(start: Start, ranks: int) -> None:
    drawn = random.Random(f"titan {ranks}")
    whole = start("whole", ranks, life="whole")
    expected = whole.wait(200)
    kill_at_random(start("killed", ranks, life="random", pause_s=0.03), "random", drawn)
    point = drawn.choice(INSIDE)
    victim = 0 if point == "commit" else drawn.randrange(ranks)
    job = start("killed", ranks, life="inside", point=point, call=2, victim=victim)
    job.wait_for_one(200)
    job.kill()
    job = start("killed", ranks, life="last")
    answers = job.wait(200)
    for rank in range(ranks):
        of_whole = losses(whole.folder, "whole", rank)
        for life in ("random", "inside", "last"):
            found = losses(job.folder, life, rank)
            assert {s: loss for s, loss in found.items() if of_whole[s] != loss} == {}, (point, life)
        first = min(losses(job.folder, "last", rank))
        assert (first % EVERY, first > EVERY) == (1, True), "it did not go on from a checkpoint"
        assert max(losses(job.folder, "last", rank)) == STEPS
        assert answers[rank]["weights"] == expected[rank]["weights"]


@pytest.mark.timeout(600)
def test_another_number_of_ranks_resumes_without_the_loader(start: Start, tmp_path: Path) -> None:
    two = train(start, "run", 2, life="two")
    assert two["step"] == STEPS
    refused = train(start, "run", 1, life="one")
    assert "dataloader" in refused["error"]
    one = train(start, "run", 1, life="one", exclude_from_loading=["dataloader"])
    assert (one["step"], one["weights"]) == (STEPS, two["weights"])


# The fields of the manager -------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """The steps that are on the disk."""
    return sorted(int(p.name.split("-")[1]) for p in (folder / "disk/titan").glob("step-*"))


@pytest.mark.timeout(600)
def test_fields_are_honoured(start: Start, tmp_path: Path) -> None:
    trained = train(start, "run", keep_latest_k=2, last_save_model_only=True, last_save_in_hf=True)
    assert steps(tmp_path / "run") == [20, STEPS], "keep_latest_k"
    exported = list((tmp_path / "run/checkpoint/step-24").glob("*.safetensors"))
    assert exported, "last_save_in_hf"
    again = train(start, "run", life="again", load_step=20)
    assert min(losses(tmp_path / "run", "again")) == 21, "load_step"
    assert again["weights"] == trained["weights"]
