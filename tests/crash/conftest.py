"""The warm process that forks trainers, and the seed of their lives."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lives import Trainers


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    started = Trainers()
    yield started
    started.close()


@pytest.fixture
def seed() -> int:
    """What decides a life; set TIERFALL_KILL_SEED to live another one, or one that failed again."""
    return int(os.environ.get("TIERFALL_KILL_SEED", "1"))
