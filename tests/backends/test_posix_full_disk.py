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
    fail,
    files_below,
    get,
    put,
    root_of,
)

from tierfall.backends.posix import system
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.errors import BackendError, StorageFullError, UnreachableError


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


def test_a_full_disk_is_reported_when_space_is_reserved(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, length: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(system, "fallocate", full)
    with pytest.raises(StorageFullError, match="reserve 1048576 bytes for 'run/key'"):
        backend.create("run/key", length=CHUNK_BYTES)
    assert os.listdir(root_of(backend)) == []


def test_where_nothing_can_be_reserved_writing_goes_on(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "fallocate", lambda descriptor, length: False)
    data = chunk()
    with backend.create("run/key", length=CHUNK_BYTES) as writer:
        writer.write(0, data)
        writer.publish()
    assert get(backend, "run/key") == data


def test_a_full_disk_while_writing_kills_the_writer(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = backend.create("run/key")
    fail(monkeypatch, "pwrite", errno.ENOSPC)
    with pytest.raises(StorageFullError, match="write 1048576 bytes at 0 of 'run/key'"):
        writer.write(0, chunk())
    monkeypatch.undo()
    assert os.listdir(root_of(backend)) == []
    with pytest.raises(BackendError, match="dead"):
        writer.write(0, chunk())


def test_a_full_disk_that_takes_direct_io_is_opened_with_it(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(system, "direct_alignment", lambda descriptor: 512)
        fail(patch, "pwrite", errno.ENOSPC)
        messages = PosixBackend(direct_folder)
        patch.setattr(system, "direct_alignment", lambda descriptor: None)
        untold = PosixBackend(direct_folder)
    assert (messages.traits.direct_io, untold.traits.direct_io) == (True, False)
    messages.close()
    untold.close()


def test_a_disk_without_room_for_a_name_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.ENOSPC, lambda name, flags, *args, **more: flags & os.O_CREAT)
        backend = PosixBackend(tmp_path)
    assert backend.traits.conditional_create
    assert not backend.traits.direct_io
    put(backend, "run/key", b"bytes")
    assert get(backend, "run/key") == b"bytes"
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
