"""What makes an object durable: the order of calls, and what a failed fsync or close costs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from backend_places import (
    CHUNK_BYTES,
    chunk,
    fail,
    files_below,
    get,
    is_file,
    is_folder,
    open_files,
    put,
    root_of,
)

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    BackendError,
    KeyNotFoundError,
    StorageFullError,
)


def test_a_failed_fsync_loses_the_object_and_leaves_nothing(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, "run/key", b"old")
    before = open_files()
    writer = backend.create("run/key", length=CHUNK_BYTES)
    writer.write(0, chunk())
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BackendError, match="count as lost") as caught:
        writer.publish()
    monkeypatch.undo()
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, OSError)
    assert len(synced) == 1, "a second fsync would lie"
    assert files_below(root_of(backend)) == ["run/key"]
    assert get(backend, "run/key") == b"old"
    assert open_files() == before
    with pytest.raises(BackendError, match="dead"):
        writer.publish()


def test_a_failed_close_loses_the_object(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = backend.create("run/key", length=CHUNK_BYTES)
    writer.write(0, chunk())
    real = os.close

    def close(descriptor: int) -> None:
        regular = is_file(descriptor)
        real(descriptor)
        if regular:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageFullError, match="count as lost"):
        writer.publish()
    monkeypatch.undo()
    assert files_below(root_of(backend)) == []


def test_a_failed_fsync_of_the_folder_is_reported(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, "run/key", b"old")
    writer = backend.create("run/key")
    writer.write(0, memoryview(b"new"))
    fail(monkeypatch, "fsync", errno.EIO, is_folder)
    with pytest.raises(BackendError, match="visible, but may not survive a power cut") as caught:
        writer.publish()
    monkeypatch.undo()
    assert not caught.value.retryable
    assert get(backend, "run/key") == b"new"
    assert files_below(root_of(backend)) == ["run/key"]


@pytest.mark.parametrize("mode", Publish)
def test_order_of_calls_at_publish(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, mode: Publish
) -> None:
    put(backend, "run/other", b"")
    calls: list[str] = []

    def record(name: str, label: Callable[..., str]) -> None:
        real = getattr(os, name)

        def stand_in(*args: object, **more: object) -> object:
            calls.append(label(*args))
            return real(*args, **more)

        monkeypatch.setattr(os, name, stand_in)

    record("pwrite", lambda *args: "write")
    record("fsync", lambda fd: "fsync file" if is_file(fd) else "fsync folder")
    for name in ("replace", "link", "unlink"):
        record(name, lambda *args, name=name: name)
    with backend.create("run/key", length=CHUNK_BYTES + 1, publish=mode) as writer:
        writer.write(0, chunk())
        writer.write(CHUNK_BYTES, memoryview(b"x"))
        writer.publish()
    seen = ["link", "unlink"] if mode is Publish.IF_ABSENT else ["replace"]
    assert calls == ["write", "write", "fsync file", *seen, "fsync folder"]


def test_new_folders_are_synced_into_their_parents_before_the_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    root = tmp_path / "new" / "tier"
    backend = PosixBackend(root)
    assert {str(tmp_path), str(tmp_path / "new")} <= set(synced)
    # Made by somebody who did not come to its fsync.
    (root / "a").mkdir()
    synced.clear()
    with backend.create("a/b/key") as writer:
        assert synced == [str(root), str(root / "a")]
        writer.publish()
    assert synced[2:] == [synced[2], str(root / "a" / "b")]
    synced.clear()
    put(backend, "a/b/key-2", b"")
    assert len(synced) == 2, "a folder that is known to be durable was synced again"
    backend.close()


def test_delete_is_synced(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, "run/key", b"")
    put(backend, "run/other", b"")
    fail(monkeypatch, "fsync", errno.EIO, is_folder)
    with pytest.raises(BackendError, match="may be back after a power cut"):
        backend.delete("run/key")


def test_what_went_before_a_deletion_that_fails_is_synced(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks again does not find it, and so would not sync it any more."""
    put(backend, "run/a", b"")
    put(backend, "run/b", b"")
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.listdir(descriptor)))
    fail(monkeypatch, "unlink", errno.EIO, lambda name, **more: name == "b")
    with pytest.raises(BackendError, match="'run/b'"):
        backend.delete_some(["run/a", "run/b"])
    assert synced == [["b"]]


def test_where_folders_cannot_be_synced_the_trait_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "fsync", errno.EINVAL, is_folder)
    backend = PosixBackend(tmp_path / "tier")
    assert not backend.traits.durable
    put(backend, "run/key", b"bytes")
    assert get(backend, "run/key") == b"bytes"
    backend.close()


def test_a_folder_that_was_removed_and_made_anew_is_synced_again(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the new folder got the number of the old one."""
    put(backend, "run/key", b"")
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: _one_folder(real(descriptor)))
    put(backend, "run/key", b"")
    backend.delete("run/key")
    fail(monkeypatch, "fsync", errno.EIO, is_folder)
    with pytest.raises(BackendError, match="new folder 'run'"):
        backend.create("run/key")


def _one_folder(status: os.stat_result) -> os.stat_result:
    values = list(status)
    if stat.S_ISDIR(status.st_mode):
        values[1] = 2
    return os.stat_result(values)


def test_what_somebody_else_published_is_made_durable_by_a_sync_of_its_folder(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, "run/step/key", b"data")
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert backend.traits.needs_sync
    backend.sync("run/step")
    assert synced == [f"{root_of(backend)}/run/step"]


def test_a_sync_that_fails_is_not_tried_again_by_itself(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, "run/key", b"data")
    fail(monkeypatch, "fsync", errno.EIO, is_folder)
    with pytest.raises(BackendError, match="may not survive a power cut: write it anew") as caught:
        backend.sync("run")
    assert not caught.value.retryable
    assert not isinstance(caught.value, KeyNotFoundError)
