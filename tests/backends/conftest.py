from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from s3_stub import Stub, opened

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.posix.backend import PosixBackend


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server that answers what it is told to."""
    made = Stub()
    yield made
    made.close()


@pytest.fixture
def stubbed(stub: Stub) -> Iterator[ObjectStoreBackend]:
    """A place in a store that keeps the condition; then it takes everything."""
    made = opened(stub)
    yield made
    made.close()


@pytest.fixture(scope="session")
def direct_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that takes direct I/O; without one the test is skipped."""
    folder = tmp_path_factory.mktemp("direct")
    with closing(PosixBackend(folder / "probe")) as backend:
        if not backend.traits.direct_io:
            pytest.skip(f"no direct I/O in {folder}")
    return folder


@pytest.fixture(params=["buffered", "direct"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PosixBackend]:
    if request.param == "direct":
        request.getfixturevalue("direct_folder")
    made = PosixBackend(tmp_path / "tier", direct_io=request.param == "direct")
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mount does not work here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
