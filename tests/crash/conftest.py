"""The warm process that forks trainers, and a folder for each life."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lives import Trainers

SHARED = Path("/dev/shm")


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    started = Trainers()
    yield started
    started.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder for arenas, in memory where there is such."""
    folder = Path(
        tempfile.mkdtemp(prefix="tierfall-crash-", dir=SHARED if SHARED.is_dir() else None)
    )
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def seed() -> int:
    """What decides a life; set TIERFALL_KILL_SEED to live another one, or one that failed again."""
    return int(os.environ.get("TIERFALL_KILL_SEED", "1"))
