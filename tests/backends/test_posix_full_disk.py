"""A disk without room, by hand and for real, and one that goes away."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from backend_places import (
    CHUNK_BYTES,
    chunk,
    files_below,
    get,
    put,
)

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import StorageFullError, UnreachableError


@pytest.mark.parametrize("length", [8 * CHUNK_BYTES, None])
def test_a_disk_that_is_really_full(small_disk: Path, length: int | None) -> None:
    backend = PosixBackend(small_disk / "tier")
    put(backend, "run/old", b"old")

    def write() -> None:
        with backend.create("run/new", length=length) as writer:
            for number in range(8):
                writer.write(number * CHUNK_BYTES, chunk())
            writer.publish()

    with pytest.raises(StorageFullError):
        write()
    assert files_below(small_disk / "tier") == ["run/old"]
    assert get(backend, "run/old") == b"old"
    with backend.create("run/new") as writer:
        writer.write(0, chunk())
        writer.publish()
    assert get(backend, "run/new") == chunk()
    backend.close()


def test_a_full_disk_can_still_be_opened_read_and_cleaned(small_disk: Path) -> None:
    first = PosixBackend(small_disk)
    put(first, "run/key", b"bytes")
    first.close()
    _fill(small_disk / "filler")
    backend = PosixBackend(small_disk)
    assert get(backend, "run/key") == b"bytes"
    with pytest.raises(StorageFullError):
        put(backend, "run/other", b"bytes")
    backend.delete("filler")
    put(backend, "run/other", b"bytes")
    backend.close()


def test_an_unmounted_root_is_unreachable_and_not_written_to(small_disk: Path) -> None:
    backend = PosixBackend(small_disk)
    put(backend, "run/key", b"bytes")
    writer = backend.create("run/new")
    writer.write(0, memoryview(b"bytes"))
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    for call in (
        lambda: backend.stat("run/key"),
        lambda: get(backend, "run/key"),
        lambda: list(backend.scan("")),
        lambda: backend.create("run/other"),
        lambda: backend.delete("run/key"),
        writer.publish,
    ):
        with pytest.raises(UnreachableError, match="the folder is not the one that was opened"):
            call()
    assert os.listdir(small_disk) == []
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(small_disk)], check=True)
    with pytest.raises(UnreachableError):
        backend.stat("run/key")
    backend.close()


def _fill(path: Path) -> None:
    """Take all the room that there is."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    end = 0
    while _takes(file, end):
        end += 4096
    os.close(file)


def _takes(file: int, offset: int) -> bool:
    try:
        return os.pwrite(file, bytes(4096), offset) == 4096
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
