"""Jobs of training frameworks: processes that begin with the framework imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.distributed.job import Job

FRAMEWORKS = {
    **{"transformers.trainer": "transformers", "accelerate": "accelerate", "peft": "peft"},
    **{"datasets": "datasets", "trl": "trl"},
    "tests.integrations.frameworks.torchtitan_on_cpu": "torchtitan",
}
"""What the processes import, if the package beside it is there."""


class Alone(Job):
    """A process without a launcher."""

    def launcher(self, rank: int) -> dict[str, str]:
        return {}


@pytest.fixture(scope="session")
def _imported() -> Iterator[None]:
    """Have servers of our own, which begin with what there is of the frameworks."""
    earlier = dict(forked._servers)
    forked._servers.clear()
    # Arrow's allocator starts a thread otherwise, which a fork would lose.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    os.environ[forked.MORE] = " ".join(n for n, needed in FRAMEWORKS.items() if find_spec(needed))
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
