"""Ranks of a real job hand each other at a restore what is read once, and what only some of them can read."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

PROGRAM = Path(__file__).with_name("pulls_program.py")
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
@pytest.mark.parametrize("group", ["none", "default"])
def test_what_only_another_node_has_is_read_there(
    job: Callable[..., Job], tmp_path: Path, group: str
) -> None:
    job(4, TWO_NODES).run("save")
    remove(tmp_path, "pfs")
    answers = job(4, SWAPPED).run("restore", group=group, mine=True)
    all_good(answers)
    for answer in answers:
        assert answer["read"].keys() <= {"nvme"}
        assert {tier for tier, _, _ in answer["got"]} == {"nvme"}


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
def test_a_rank_that_dies_while_it_reads_for_others_is_named_by_them(
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
            assert answer["seconds"] < 40, "ten times max_wait is for ranks that are slow"
    assert time.monotonic() - began < 80
    all_good(job(4).run("restore"))


@pytest.mark.torture
def test_a_rank_that_raises_while_it_reads_ends_the_restore_for_all(
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


@pytest.mark.torture
def test_a_rank_that_stands_still_for_a_while_costs_the_others_no_bytes(
    job: Callable[..., Job],
) -> None:
    """They read for themselves what it was to read, and wait for it."""
    job(4).run("save")
    started = job(4).start("restore", victim=2, how="stops", max_wait="8s")
    others = [rank for rank in range(4) if rank != 2]

    def told() -> list[int]:
        return [started.log(rank).count("does not send what it is asked for") for rank in others]

    deadline = time.monotonic() + 60
    while not any(told()):
        assert time.monotonic() < deadline, started.log(0)
        time.sleep(0.1)
    started.processes[2].send_signal(signal.SIGCONT)
    all_good(started.wait())
    assert max(told()) == 1, "one warning"
