"""Jobs of training frameworks: processes that begin with the framework imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.distributed.job import Job


class Alone(Job):
    """A process without a launcher. If it begins a process group of its own, it takes the store that the test has."""

    def launcher(self, rank: int) -> dict[str, str]:
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(scope="module")
def _imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have servers of our own, which begin with what the test file names in ``IMPORTS``: its own framework alone."""
    earlier = dict(forked._servers)
    forked._servers.clear()
    # Arrow's allocator starts a thread otherwise, which a fork would lose.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    os.environ[forked.MORE] = " ".join(request.module.IMPORTS)
    yield
    del os.environ[forked.MORE]
    forked._close_servers()
    forked._servers.clear()
    forked._servers.update(earlier)


@pytest.fixture
def make_job(_imported: None) -> Iterator[Callable[..., Job]]:
    """``make_job(folder, program, ranks)``: a job of a framework's program. None outlives the test."""
    jobs: list[Job] = []

    def make(folder: Path, program: Path, ranks: int = 1) -> Job:
        folder.mkdir(exist_ok=True)
        job: Any = (Job if ranks > 1 else Alone)(folder, ranks, program=program)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.kill()
