"""The POSIX backend when the operating system fails it, is slow, or does things by halves."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from backend_places import (
    fail,
    files_below,
    get,
    open_files,
    put,
    root_of,
)

from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.posix import system
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.system import backend_error
from tierfall.backends.toolkit.keys import is_unfinished
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyInvalidError,
    KeyNotFoundError,
    StorageFullError,
    UnreachableError,
)


def test_short_writes_and_reads_are_continued(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    data = memoryview(bytes(range(256)) * 4096 + b"tail")
    ragged = iter([5000, 100_000, 4096, 70_001] * 1000)

    def short_write(descriptor: int, view: memoryview, offset: int) -> int:
        return (
            pwrite(descriptor, view[: next(ragged)], offset)
            if _buffered(descriptor)
            else (_short_direct(pwrite, descriptor, view, offset))
        )

    def short_read(descriptor: int, views: list[memoryview], *more: int) -> int:
        return preadv(descriptor, [views[0][:65_536]], *more)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    with backend.create("run/key", length=data.nbytes) as writer:
        writer.write(0, data)
        writer.publish()
    assert get(backend, "run/key") == data


def _buffered(descriptor: int) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}") as info:
        flags = int(next(line for line in info if line.startswith("flags")).split()[1], 8)
    return not flags & os.O_DIRECT


def _short_direct(
    pwrite: Callable[[int, memoryview, int], int], descriptor: int, view: memoryview, offset: int
) -> int:
    """Write two blocks, and say that it was one and a half."""
    assert offset % 4096 == 0
    return min(pwrite(descriptor, view[:8192], offset), 6144 if view.nbytes > 8192 else 8192)


def test_an_abort_beside_a_write_closes_nothing_under_it(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed number may be another file a moment later: the late write must not land there."""
    writing, aborted = threading.Event(), threading.Event()
    real = os.pwrite
    inodes: list[int] = []

    def pwrite(descriptor: int, view: memoryview, offset: int) -> int:
        inodes.append(os.fstat(descriptor).st_ino)
        writing.set()
        assert aborted.wait(30)
        inodes.append(os.fstat(descriptor).st_ino)
        return real(descriptor, view, offset)

    before = open_files()
    writer = backend.create("run/key")
    monkeypatch.setattr(os, "pwrite", pwrite)
    thread = threading.Thread(target=writer.write, args=(0, memoryview(b"late")))
    thread.start()
    assert writing.wait(30)
    writer.abort()
    assert files_below(root_of(backend)) == []
    aborted.set()
    thread.join()
    assert inodes[0] == inodes[1]
    assert open_files() == before
    assert os.listdir(root_of(backend)) == []


def test_a_link_that_was_answered_twice_is_ours(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a network the answer to a link can get lost, and the client's second try then finds its own first."""
    real = os.link

    def link(*args: object, **more: object) -> None:
        real(*args, **more)  # type: ignore[arg-type]
        real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", link)
    with backend.create("run/key", publish=Publish.IF_ABSENT) as writer:
        writer.write(0, memoryview(b"ours"))
        writer.publish()
    assert files_below(root_of(backend)) == ["run/key"]
    with (
        backend.create("run/key", publish=Publish.IF_ABSENT) as writer,
        pytest.raises(KeyExistsError),
    ):
        writer.publish()


@pytest.mark.parametrize("renames", [True, False])
def test_without_hard_links_an_exclusive_rename_is_taken_or_the_trait_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: bool
) -> None:
    fail(monkeypatch, "link", errno.EPERM)
    if not renames:
        monkeypatch.setattr(system, "rename_if_absent", lambda *args: False)
    backend = PosixBackend(tmp_path)
    assert backend.traits.conditional_create is renames
    assert files_below(tmp_path) == []
    if renames:
        for name in CHECKS:
            if "conditional" in name:
                check_promise(name, lambda name=name: PosixBackend(tmp_path / name), reopen=_reopen)
    else:
        with pytest.raises(BackendError, match="neither hard links nor an exclusive rename"):
            backend.create("run/key", publish=Publish.IF_ABSENT)
    backend.close()


def _reopen(backend: object) -> PosixBackend:
    assert isinstance(backend, PosixBackend)
    return PosixBackend(backend.place)


def test_a_folder_that_is_removed_while_a_writer_begins_is_made_again(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = os.open, []

    def remove_first(name: object, *args: object, **more: object) -> int:
        if isinstance(name, str) and is_unfinished(name) and len(removed) < 3:
            removed.append(name)
            os.rmdir(root_of(backend) / "run")
        return real(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", remove_first)
    put(backend, "run/key", b"bytes")
    assert len(removed) == 3
    assert get(backend, "run/key") == b"bytes"


@pytest.mark.parametrize(
    ("number", "kind", "retryable"),
    [
        (errno.EIO, UnreachableError, True),
        (errno.ESTALE, UnreachableError, True),
        (errno.ETIMEDOUT, UnreachableError, True),
        (errno.ENOTCONN, UnreachableError, True),
        (errno.ENODATA, UnreachableError, True),
        (errno.EHOSTDOWN, UnreachableError, True),
        (errno.EACCES, AccessDeniedError, False),
        (errno.EROFS, AccessDeniedError, False),
        (errno.ENOSPC, StorageFullError, False),
        (errno.EDQUOT, StorageFullError, False),
        (errno.ENAMETOOLONG, KeyInvalidError, False),
        (errno.EXDEV, BackendError, False),
    ],
)
def test_errno_table(
    backend: PosixBackend,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[BackendError],
    retryable: bool,
) -> None:
    assert type(backend_error(OSError(number, "text"), "what")) is kind
    put(backend, "run/key", b"bytes")
    fail(monkeypatch, "open", number, lambda name, *args, **more: name == "key")
    with pytest.raises(kind, match=r"read 'run/key' in .*tier") as caught:
        backend.read_into("run/key", 0, memoryview(bytearray(1)))
    assert caught.value.retryable is retryable
    assert not isinstance(caught.value, KeyNotFoundError)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_listing_that_cannot_be_read_raises_also_in_the_middle(
    backend: PosixBackend, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also if it is one of several folders that are listed at once."""
    for key in ("a/key", "b/a/key", "b/c/key", "b/d/key", "d/key"):
        put(backend, key, b"")
    fail(monkeypatch, "open", number, lambda name, *args, **more: name == "c")
    found = []
    with pytest.raises(BackendError, match="list 'b/c/'") as caught:  # noqa: PT012 - in the middle
        for stored in backend.scan(""):
            found.append(stored.key)
    assert not isinstance(caught.value, KeyNotFoundError)
    assert found == ["a/key"]
    with pytest.raises(BackendError, match="list 'b/c/'"):
        backend.discard_unfinished("b/")
