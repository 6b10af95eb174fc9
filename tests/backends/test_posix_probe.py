"""What is found out at open: direct I/O by trying it, or, for reading only, by asking; and that no trace is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from backend_places import (
    fail,
    files_below,
    put,
)

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import UnreachableError


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
