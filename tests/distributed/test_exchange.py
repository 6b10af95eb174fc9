"""Ranks of a real job hand each other at a restore what is read once, and what only some of them can read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("exchange_program.py")
ONE_NODE, TWO_NODES, SWAPPED = [0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]
TENSORS, TENSOR_BYTES = 8, 150 * 400 * 4
WHOLE = TENSORS * TENSOR_BYTES
HEADER = 64 << 10


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    return partial(make_job, program=PROGRAM)


def read(answers: list[dict[str, Any]], tier: str) -> int:
    return sum(answer["read"].get(tier, 0) for answer in answers)


def all_good(answers: list[dict[str, Any]], step: int = 1) -> None:
    assert [(a.get("step"), a.get("good")) for a in answers] == [(step, True)] * len(answers), (
        answers
    )


def remove(folder: Path, *names: str) -> None:
    """Empty tiers, but for what says which tier each is: a shared one in which nothing lies counts as not mounted."""
    for name in names:
        for path in (folder / name).glob("*/*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "tier.json":
                path.unlink()


def damage(image: Path, *, chunks: int = 0) -> None:
    """Flip a bit of the last chunk; or, of so many chunks, one each."""
    data = bytearray(image.read_bytes())
    for place in [*(HEADER + 5 + n * (64 << 10) for n in range(chunks)), len(data) - 1]:
        data[place] ^= 1
    image.write_bytes(data)


@pytest.mark.parametrize(
    ("saved_by", "whole", "group"),
    [
        (4, False, "default"),
        pytest.param(2, True, "given", marks=pytest.mark.torture),
        pytest.param(1, True, "default", marks=pytest.mark.torture),
    ],
)
def test_replicas_read_one_copy_of_the_checkpoint_from_the_tier_that_they_share(
    job: Callable[..., Job], tmp_path: Path, saved_by: int, whole: bool, group: str
) -> None:
    if saved_by == 4:
        answers = job(4, TWO_NODES).run("save_and_restore")
    else:
        job(saved_by).run("save", whole=whole)
        remove(tmp_path, "nvme-0")
        answers = job(4, TWO_NODES).run("restore", group=group)
    all_good(answers)
    headers = (4 + saved_by) * (HEADER + 4096)  # a rank's own, and each once to hand on
    assert WHOLE <= read(answers, "pfs") <= WHOLE + headers
    for rank, answer in enumerate(answers):
        assert answer["read"]["pfs"] <= WHOLE / 4 + 2 * (64 << 10) + 2 * HEADER, "in equal shares"
        assert answer["read"]["pfs"] + sum(n for _, _, n in answer["got"]) == answer["bytes"]
        assert {(tier, by) for tier, by, _ in answer["got"]} == {
            ("pfs", other) for other in range(4) if other != rank
        }


@pytest.mark.torture
def test_without_a_process_group_what_another_node_has_is_an_error_that_says_what_helps(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    job(4, TWO_NODES).run("save")
    remove(tmp_path, "pfs")
    for answer in job(4, SWAPPED).run("restore", group="none", mine=True):
        assert answer["error"] == "RestoreError"
        assert "init_process_group" in answer["text"]
        assert "process_group" in answer["text"]


@pytest.mark.torture
def test_a_chunk_damaged_on_one_node_is_read_on_the_other(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    job(4, ONE_NODE).run("save")
    remove(tmp_path, "pfs")
    shutil.copytree(tmp_path / "nvme-0", tmp_path / "nvme-1")
    folder = "many/step-00000001-a0001"
    damage(tmp_path / "nvme-0" / folder / "rank-00000-of-00004.safetensors", chunks=7)
    answers = job(4, TWO_NODES).run("restore", mine=True)
    all_good(answers)
    assert {by for _, by, _ in answers[0]["got"]} <= {2, 3}
    assert any("does not match its digest" in text for text in answers[0]["fallbacks"])


@pytest.mark.torture
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_in_the_exchange_is_named_by_all_others(
    job: Callable[..., Job], victim: int
) -> None:
    job(4).run("save")
    began = time.monotonic()
    answers = job(4).run("restore", victim=victim, how="dies", max_wait="8s")
    assert answers[victim] == {"exit": -9}
    for rank, answer in enumerate(answers):
        if rank != victim:
            assert answer["error"] in ("RanksError", "RestoreError"), answer
            assert f"rank {victim}" in answer["text"] or "rank 0 gave no answer" in answer["text"]
            assert "restore of 1@1: " in answer["text"]
            # what was wanted of it, or, where nothing was yet, what they were doing together
            where = ("chunk ", "header", "restore: exchange: ")
            assert any(one in answer["text"] for one in where)
            assert answer["seconds"] < 40, "ten times max_wait is for ranks that are slow"
    assert time.monotonic() - began < 80
    all_good(job(4).run("restore"))


@pytest.mark.torture
def test_a_rank_that_raises_in_the_exchange_ends_it_for_all_at_once(
    job: Callable[..., Job],
) -> None:
    job(4).run("save")
    answers = job(4).run("restore", victim=1, how="raises")
    for answer in answers:
        assert answer["error"] == "RestoreError"
        assert "no more" in answer["text"]
        assert answer["seconds"] < 15
    for rank in (0, 2, 3):
        assert "rank 1: " in answers[rank]["text"]


@pytest.mark.torture
def test_a_rank_that_stands_still_keeps_nobody_waiting_for_ever(job: Callable[..., Job]) -> None:
    job(4).run("save")
    stopped = job(4).start("restore", victim=2, how="stops", max_wait="3s")
    began = time.monotonic()
    while any(stopped.processes[rank].poll() is None for rank in (0, 1, 3)):
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    stopped.kill()
