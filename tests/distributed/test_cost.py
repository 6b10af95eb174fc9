"""What several ranks cost: nothing on the thread that saves, and little between the last image and its commit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job

SAVES = 8
ONE_TIER = {"nvme": {"flush": {"every": 1000}}}


@pytest.mark.torture
def test_save_on_many_ranks_costs_its_caller_what_it_costs_on_one(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    # Eight runs of one rank load the machine as one run of eight does, so that both pay the same for its caches.
    runs = [make_job(1).start("cost", saves=SAVES, **ONE_TIER, run=f"alone-{n}") for n in range(8)]
    alone = [answer for run in runs for answer in run.wait()]
    together = make_job(8).run("cost", saves=SAVES, **ONE_TIER, run="together")
    assert [answer["messages"] for answer in together] == [0] * 8
    one = median_cpu_s(alone)
    many = median_cpu_s(together)
    commits = []
    for step in map(str, range(3, SAVES + 1)):
        last = max(answer["landed"][step] for answer in together)
        commits.append(together[0]["there"][step] - last)
    print(f"save: {one * 1e3:.2f} ms of CPU alone, {many * 1e3:.2f} ms on each of 8 ranks")
    print(f"commit after the last rank's image: {statistics.median(commits) * 1e3:.1f} ms")
    assert many - one < 2e-3
    assert statistics.median(commits) < 0.1


def median_cpu_s(answers: list[dict[str, Any]]) -> float:
    """Return the median of what a save costs its caller, without the first two saves of each rank."""
    return statistics.median(s for answer in answers for s in answer["cpu_s"][2:])
