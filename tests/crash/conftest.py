"""The seed of the trainers' lives."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def seed() -> int:
    """What decides a life; set TIERFALL_KILL_SEED to live another one, or one that failed again."""
    return int(os.environ.get("TIERFALL_KILL_SEED", "1"))
