"""Jobs that a test started do not outlive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.job import Job


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make a job in the test's folder: ``make_job(4, [0, 0, 1, 1])`` has two nodes of two ranks."""
    jobs: list[Job] = []

    def make(
        world_size: int, node_of: list[int] | None = None, kind: type[Job] = Job, **options: Any
    ) -> Job:
        job = kind(tmp_path, world_size, node_of or [], **options)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.kill()
