"""Fixtures of the contract. What the tests beside this folder change inside tierfall is not changed here."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.faulty import Faulty
from tests.contract.kit import Crew, Log, Place, crew, new_place


@pytest.fixture(autouse=True)
def impatient_probe() -> None:
    """In place of the one of all other tests, which shortens a wait inside tierfall."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """The folders of a run."""
    with new_place(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def module_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The folders of a run that several tests of a file read."""
    with new_place(tmp_path_factory.mktemp("module")) as made:
        yield made


@pytest.fixture
def store(place: Place) -> Iterator[Faulty]:
    """The tier ``store`` of the run, whose faults a test sets."""
    made = Faulty(place.root)
    yield made
    made.heal()


@pytest.fixture
def log() -> Iterator[Log]:
    """What tierfall logs, from DEBUG on."""
    logger, handler = logging.getLogger("tierfall"), Log()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def mount() -> Iterator[Callable[[Path, str], None]]:
    """``mount(folder, size)``: a file system of that size there, unless this user may mount none."""
    mounted: list[Path] = []

    def make(folder: Path, size: str) -> None:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user mounts nothing")
        mounted.append(folder)

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four ranks on one node, one start for all tests of a file."""
    with crew(tmp_path_factory.mktemp("ranks"), 4) as ranks:
        yield ranks
