"""What filesystems of fsspec's do wrong is told apart: folders, and a stand-in for object stores that are not here."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_places import OPERATIONS, files_below, get, powerless, put
from s3_stub import refused

from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.core.types.errors import AccessDeniedError, StorageFullError, UnreachableError
from tierfall.core.types.values import Driver

LONG = memoryview(bytes(9 * 1024 * 1024))


def open_folder(path: Path) -> ObjectStoreBackend:
    backend = open_backend(f"file://{path}", driver=Driver.FSSPEC)
    assert isinstance(backend, ObjectStoreBackend)
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> ObjectStoreBackend:
    backend = open_folder(tmp_path / "tier")
    put(backend, "run/key", b"old")
    return backend


def test_what_a_killed_process_left_is_collected(
    folder: ObjectStoreBackend, tmp_path: Path
) -> None:
    """The writers are dropped as a killed process drops them: without abort."""
    writers = [folder.create(key) for key in ("run/a", "run/deep/b", "c")]
    for writer in writers:
        writer.write(0, LONG)
    assert len(files_below(tmp_path)) == 4
    assert [each.key for each in folder.scan("")] == ["run/key"]
    assert folder.discard_unfinished("") == 0, "its own living writers"
    second = open_folder(tmp_path / "tier")
    assert [second.discard_unfinished(prefix) for prefix in ("run/deep/", "run/", "")] == [1, 1, 1]
    assert files_below(tmp_path) == ["tier/run/key"]
    for writer in writers:
        writer.abort()


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that others may enter; tmp_path's parents are closed to them."""
    with tempfile.TemporaryDirectory(prefix="tierfall-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_place_that_is_gone_is_not_nothing_there(
    folder: ObjectStoreBackend, tmp_path: Path, name: str
) -> None:
    (tmp_path / "tier").rename(tmp_path / "elsewhere")
    error = refused(lambda: OPERATIONS[name](folder))
    # What goes in order does not outlive an error: it is not retryable then, and says why.
    assert type(error.__cause__ if name == "put long" else error) is UnreachableError
    assert "is not there" in str(error)
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_folder_that_may_not_be_entered_is_not_nothing_there(
    open_to_all: Path, name: str
) -> None:
    folder = open_folder(open_to_all)
    put(folder, "run/key", b"old")
    (open_to_all / "run").chmod(0)
    with powerless():
        assert type(refused(lambda: OPERATIONS[name](folder))) is AccessDeniedError
    (open_to_all / "run").chmod(0o755)
    assert files_below(open_to_all) == ["run/key"]


def test_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    backend = open_folder(small_disk)
    put(backend, "run/key", b"old")
    for size_bytes in (5 * 1024 * 1024, LONG.nbytes):
        assert type(refused(lambda size=size_bytes: put(backend, "run/key", bytes(size)))) is (
            StorageFullError
        )
        assert files_below(small_disk) == ["run/key"]
    assert get(backend, "run/key") == b"old"


def test_a_filesystem_that_takes_a_part_only_is_noticed(
    folder: ObjectStoreBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Short(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data) - 1

    system = folder._client._system  # type: ignore[attr-defined]
    monkeypatch.setattr(system, "open", lambda path, mode: Short())
    assert "only a part" in str(refused(lambda: put(folder, "run/key", b"new")))
    assert files_below(tmp_path) == ["tier/run/key"]
