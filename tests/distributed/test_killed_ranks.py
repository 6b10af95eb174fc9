"""One rank dies in each phase, the launcher ends the others, all start again: nothing that was durable is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.job import Job
from tests.distributed.killing import POINTS

STEPS = [1, 2, 3]
SAMPLE = random.Random(20261122).sample([(n, r) for n in POINTS for r in range(2)], k=2)


@pytest.mark.parametrize(("point", "rank"), SAMPLE)
def test_a_rank_killed_in_a_phase_costs_nothing_that_was_durable(
    make_job: Callable[..., Job], tmp_path: Path, point: str, rank: int
) -> None:
    kill_and_check(make_job, tmp_path, [0, 0], point, rank, call=2)


@pytest.mark.torture
@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("point", POINTS)
def test_each_of_eight_ranks_is_killed_in_each_phase(
    make_job: Callable[..., Job], tmp_path: Path, point: str, rank: int
) -> None:
    kill_and_check(make_job, tmp_path, [0, 0, 0, 0, 1, 1, 1, 1], point, rank, call=2)


def kill_and_check(
    make_job: Callable[..., Job],
    folder: Path,
    nodes: list[int],
    point: str,
    victim: int,
    call: int,
) -> None:
    """Kill one rank where it stands, end the others, and see what the next start makes of it."""
    count = len(nodes)
    began = make_job(count, nodes).run("train", steps=[1])
    assert began == [None] * count, f"the first start failed: {began}"
    once = POINTS[point].committer and victim not in {nodes.index(node) for node in nodes}
    job = make_job(count, nodes).start(
        "train",
        steps=STEPS,
        victim=nodes.index(nodes[victim]) if once else victim,
        point=point,
        call=1 if point in ("open", "opened") else call,
    )
    job.wait_for_kill()
    job.kill()
    durable = {
        int(line)
        for rank in range(count)
        for line in (folder / f"durable-{rank}").read_text().split()
    }
    answers = make_job(count, nodes).run("train", steps=[*STEPS, 4])
    restored = set(answers)
    assert len(restored) == 1, f"ranks went on from different steps: {answers}"
    assert restored.pop() >= max(durable), "a step that was durable is gone"
    for tier in [*(f"nvme-{node}" for node in set(nodes)), "pfs"]:
        for step in (folder / tier / "many").glob("step-*"):
            assert (step / "commit.json").exists(), f"{step} was left half-done"
            own = nodes.count(int(tier[5:])) if tier != "pfs" else count
            assert len(list(step.glob("rank-*.safetensors"))) == own
