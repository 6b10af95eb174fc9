"""Where a POSIX backend may be opened, what it finds out there, and what it never follows or touches."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_places import (
    CHUNK_BYTES,
    chunk,
    files_below,
    get,
    open_files,
    powerless,
    put,
    root_of,
)

from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    UnreachableError,
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach too."""
    folder = Path(tempfile.mkdtemp(prefix="tierfall-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["file", "dangling", "file/below"])
def test_a_root_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BackendError, match=name):
        PosixBackend(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_what_is_created_exclusively_lies_on_the_server_of_its_name(tmp_path: Path) -> None:
    """GlusterFS finds the server of a file by its name, of ``.NAME.suffix`` by NAME (``rsync-hash-regex``)."""
    backend = PosixBackend(tmp_path)
    with backend.create("run/commit.json", length=1, publish=Publish.IF_ABSENT) as writer:
        (name,) = os.listdir(tmp_path / "run")
        found = re.fullmatch(r"\.(.+)\.[^.]+", name)
        assert found is not None
        assert found[1] == "commit.json"
        assert list(backend.scan("")) == []
        writer.write(0, memoryview(b"1"))
        writer.publish()
    assert os.listdir(tmp_path / "run") == ["commit.json"]
    (tmp_path / "run" / name).touch()  # as a killed writer leaves it
    assert backend.discard_unfinished("run/") == 1
    backend.close()


def test_a_folder_that_another_node_is_creating_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parallel file system refuses its name some milliseconds before it shows the folder."""
    make, late = os.mkdir, []

    def made_elsewhere(path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        at = path if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        late.append(threading.Timer(0.05, make, [at]))
        late[-1].start()
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    monkeypatch.setattr(os, "mkdir", made_elsewhere)
    backend = PosixBackend(tmp_path / "tier")
    put(backend, "run/step/key", b"bytes")
    assert len(late) == 3
    assert get(backend, "run/step/key") == b"bytes"
    backend.close()


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_root_without_write_permission_is_refused_by_name(open_folder: Path, mode: int) -> None:
    root = open_folder / "tier"
    root.mkdir()
    root.chmod(mode)
    before = open_files()
    with powerless(), pytest.raises(AccessDeniedError, match=str(root)):
        PosixBackend(root)
    with powerless(), pytest.raises(AccessDeniedError, match="tier/below"):
        PosixBackend(root / "below")
    assert open_files() == before


def test_permission_denied_below_the_root_is_not_taken_for_absence(open_folder: Path) -> None:
    backend = PosixBackend(open_folder)
    put(backend, "run/key", b"bytes")
    (open_folder / "run").chmod(0)
    with powerless():
        for call in (
            lambda: backend.stat("run/key"),
            lambda: get(backend, "run/key"),
            lambda: list(backend.scan("")),
            lambda: list(backend.scan("run/")),
            lambda: backend.create("run/new"),
            lambda: backend.delete("run/key"),
            lambda: backend.delete_some(["run/key", "run/other"]),
            lambda: backend.discard_unfinished(""),
        ):
            with pytest.raises(AccessDeniedError, match="run"):
                call()
    (open_folder / "run").chmod(0o755)
    assert get(backend, "run/key") == b"bytes"
    backend.close()


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    backend = PosixBackend(tmp_path / "link")
    put(backend, "run/key", b"bytes")
    assert files_below(tmp_path / "real") == ["run/key"]
    (tmp_path / "other").mkdir()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(UnreachableError, match="not the one that was opened"):
        put(backend, "run/key", b"bytes")
    assert files_below(tmp_path / "other") == []
    backend.close()


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[PosixBackend]:
    """A tier with links in it that lead to a folder and a file outside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    backend = PosixBackend(tmp_path / "tier")
    put(backend, "run/real", b"bytes")
    (tmp_path / "tier" / "run" / "folder").symlink_to(outside)
    (tmp_path / "tier" / "run" / "file").symlink_to(outside / "key")
    (tmp_path / "tier" / "linked").symlink_to(outside)
    yield backend
    assert (outside / "key").read_text() == "secret"
    assert os.listdir(outside) == ["key"]
    backend.close()


def test_links_below_the_root_are_not_followed(linked: PosixBackend) -> None:
    for key in ("run/folder/key", "run/file", "linked/key"):
        for call in (linked.stat, lambda key: linked.read_into(key, 0, memoryview(bytearray(1)))):
            with pytest.raises(AccessDeniedError, match="link"):
                call(key)
    for key in ("run/folder/key", "run/folder/deep/key", "linked/key"):
        with pytest.raises(AccessDeniedError, match="link"):
            linked.create(key)
        with pytest.raises(AccessDeniedError, match="link"):
            linked.delete(key)
        with pytest.raises(AccessDeniedError, match="link"):
            linked.delete_some([key, "run/none"])
    with pytest.raises(AccessDeniedError, match="link"):
        linked.delete("run/file")
    assert [stored.key for stored in linked.scan("")] == ["run/real"]
    for prefix in ("linked/", "run/folder/"):
        with pytest.raises(AccessDeniedError, match="link"):
            list(linked.scan(prefix))
        with pytest.raises(AccessDeniedError, match="link"):
            linked.discard_unfinished(prefix)


def test_publish_replaces_a_link_and_not_what_it_leads_to(linked: PosixBackend) -> None:
    with (
        linked.create("run/file", publish=Publish.IF_ABSENT) as writer,
        pytest.raises(FileExistsError),
    ):
        writer.publish()
    put(linked, "run/file", b"mine")
    assert get(linked, "run/file") == b"mine"


def test_a_link_in_place_of_an_unfinished_object_is_not_written_through(
    linked: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tierfall.backends.posix.backend.unfinished_name",
        lambda leaf, **more: ".tierfall-1-0123456789abcdef.part",
    )
    outside = root_of(linked).parent / "outside"
    (root_of(linked) / ".tierfall-1-0123456789abcdef.part").symlink_to(outside / "key")
    with pytest.raises(BackendError):
        linked.create("key")


def test_special_files_are_neither_listed_nor_opened(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bad\nname").write_text("x")
    (tmp_path / ".tierfall-note").write_text("x")
    os.close(os.open(os.fsencode(tmp_path) + b"/not-\xff-text", os.O_CREAT))
    (tmp_path / "bad\\folder").mkdir()
    (tmp_path / "bad\\folder" / "key").write_text("x")
    put(backend, "good", b"")
    assert [stored.key for stored in backend.scan("")] == ["good"]
    for call in (lambda: backend.stat("pipe"), lambda: get(backend, "pipe")):
        with pytest.raises(AccessDeniedError, match="special file"):
            call()
    with pytest.raises(AccessDeniedError):
        backend.read_into("pipe", 0, memoryview(bytearray(1)))
    with pytest.raises(AccessDeniedError):
        backend.delete("pipe")
    assert backend.discard_unfinished("") == 0
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    backend.close()


@pytest.mark.parametrize("anew", [False, True])
def test_a_root_that_was_removed_is_unreachable_and_never_empty(tmp_path: Path, anew: bool) -> None:
    root = tmp_path / "tier"
    backend = PosixBackend(root)
    put(backend, "run/key", b"bytes")
    shutil.rmtree(root)
    if anew:
        root.mkdir()
    for call in (
        lambda: backend.stat("run/key"),
        lambda: backend.read_into("run/key", 0, memoryview(bytearray(1))),
        lambda: list(backend.scan("")),
        lambda: list(backend.scan("nothing/")),
        lambda: backend.delete("run/key"),
        lambda: backend.delete_some(["run/key", "run/other"]),
        lambda: backend.discard_unfinished(""),
        lambda: backend.create("run/key"),
    ):
        with pytest.raises(UnreachableError, match="tier") as caught:
            call()
        assert caught.value.retryable
    backend.close()
    assert root.exists() is anew


def test_a_root_that_vanishes_during_the_look_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at the root and the failing open it went away: "not there" is not an answer then."""
    root = tmp_path / "tier"
    backend = PosixBackend(root)
    put(backend, "run/key", b"bytes")
    real = os.dup

    def dup(descriptor: int) -> int:
        if root.exists():
            root.rename(tmp_path / "moved")
            (tmp_path / "moved" / "run" / "key").unlink()
        return real(descriptor)

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(UnreachableError):
        backend.stat("run/key")
    backend.close()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path)
    before = open_files()
    for number in range(3):
        with backend.create(f"run/{number}/key", length=CHUNK_BYTES) as writer:
            writer.write(0, chunk())
            writer.publish()
        backend.create(f"run/{number}/key").abort()
    get(backend, "run/0/key")
    list(backend.scan(""))
    next(backend.scan(""))
    for key in ("run/none", "none/none", "run"):
        with pytest.raises((KeyNotFoundError, AccessDeniedError)):
            backend.stat(key)
    backend.discard_unfinished("")
    backend.delete("run/0/key")
    assert open_files() == before
    backend.close()
