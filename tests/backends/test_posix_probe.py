"""What is found out at open: direct I/O by trying it, or, for reading only, by asking; and that no trace is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from backend_places import (
    CHUNK_BYTES,
    chunk,
    fail,
    files_below,
    get,
    put,
)

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import AccessDeniedError, UnreachableError


def test_direct_io_is_found_where_it_works(direct_folder: Path) -> None:
    backend = PosixBackend(direct_folder)
    assert backend.traits.direct_io
    assert backend.traits.alignment_bytes % os.sysconf("SC_PAGE_SIZE") == 0
    assert os.listdir(direct_folder) in ([], ["probe"])
    backend.close()
    backend = PosixBackend(direct_folder, direct_io=False)
    assert not backend.traits.direct_io
    assert backend.traits.alignment_bytes == 1
    backend.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv", "open"])
def test_a_file_system_that_refuses_direct_io_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def is_direct(*args: object, **more: object) -> bool:
        return call != "open" or bool(int(str(args[1])) & os.O_DIRECT)

    with monkeypatch.context() as patch:
        fail(patch, call, errno.EINVAL, is_direct)
        backend = PosixBackend(tmp_path)
    assert not backend.traits.direct_io
    assert backend.traits.alignment_bytes == 1
    put(backend, "run/key", b"bytes")
    assert files_below(tmp_path) == ["run/key"]
    backend.close()


def test_direct_io_that_reads_back_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(descriptor: int, views: list[memoryview], *more: int) -> int:
        count = real(descriptor, views, *more)
        views[0][len(views[0]) // 2] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    backend = PosixBackend(tmp_path)
    assert not backend.traits.direct_io
    backend.close()


def test_a_failing_disk_is_not_taken_for_a_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_folder: Path
) -> None:
    fail(monkeypatch, "pwrite", errno.EIO)
    with pytest.raises(UnreachableError, match=str(direct_folder)):
        PosixBackend(direct_folder)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A tier with one object of a chunk and a bit in it."""
    backend = PosixBackend(tmp_path / "tier")
    with backend.create("run/key") as writer:
        writer.write(0, chunk())
        writer.write(CHUNK_BYTES, memoryview(b"tail"))
        writer.publish()
    backend.create("run/unfinished")
    backend.close()
    return tmp_path / "tier"


def test_read_only_changes_nothing(stored: Path) -> None:
    for folder in (stored, stored / "run"):
        folder.chmod(0o555)
    before = {path: path.stat().st_mtime_ns for path in (stored, stored / "run")}
    names = files_below(stored)
    backend = PosixBackend(stored, read_only=True)
    assert get(backend, "run/key") == bytes(chunk()) + b"tail"
    assert [each.key for each in backend.scan("")] == ["run/key"]
    for call in (
        lambda: backend.create("run/new"),
        lambda: backend.delete("run/key"),
        lambda: backend.delete("run/none"),
        lambda: backend.delete_some(["run/none", "run/key"]),
        lambda: backend.discard_unfinished(""),
    ):
        with pytest.raises(AccessDeniedError, match="reading only"):
            call()
    backend.close()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert files_below(stored) == names


def test_read_only_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="none is not there"):
        PosixBackend(tmp_path / "none", read_only=True)
    assert os.listdir(tmp_path) == []
