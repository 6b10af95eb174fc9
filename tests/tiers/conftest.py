"""Folders in memory for image files, removed after each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_help import scratch


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = scratch()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "slot-0.0.image"
