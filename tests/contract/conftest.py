"""Fixtures of the contract. What the tests beside this folder change inside tierfall is not changed here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.kit import Crew, Place, crew


@pytest.fixture(autouse=True)
def impatient_probe() -> None:
    """In place of the one of all other tests, which shortens a wait inside tierfall."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """The folders of a run; its memory is below ``/dev/shm`` if there is one, and goes afterwards."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="tierfall-test-", dir=shared if shared.is_dir() else tmp_path
    ) as memory:
        yield Place(tmp_path, Path(memory))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four ranks on one node, one start for all tests of a file."""
    with crew(tmp_path_factory.mktemp("ranks"), 4) as ranks:
        yield ranks
