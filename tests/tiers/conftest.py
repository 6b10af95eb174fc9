"""Folders in memory for arenas, removed after each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_help import scratch

from tierfall.tiers.arena.arena import arena_name


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = scratch()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / arena_name(0)
