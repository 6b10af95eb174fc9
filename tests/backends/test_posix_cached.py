"""Reads of what lies in the page cache: told apart from what does not, and taken from there without the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from backend_places import put

from tierfall.backends.posix import system
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.system import is_cached
from tierfall.backends.toolkit.views import aligned_block
from tierfall.backends.wrappers import Retrying, RetryPolicy
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.errors import BackendError

KEY = "run/key"
BYTES = 4 << 20
PIECE = 96 << 10


@pytest.fixture
def stored(direct_folder: Path, tmp_path: Path) -> Path:
    """A folder on a disk that takes direct I/O, with one object of 4 MiB that is not in the page cache."""
    folder = tmp_path / "tier"
    backend = PosixBackend(folder)
    put(backend, KEY, content())
    backend.close()
    drop(folder / KEY)
    return folder


def content() -> bytes:
    return os.urandom(1 << 10) * (BYTES >> 10)


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    pytest.skip("this kernel does not count what is read")


def read_cached(folder: Path, *, read_only: bool = False) -> bool:
    """Ask for the object in pieces, without the disk; say whether it came, whole and right."""
    backend = PosixBackend(folder, read_only=read_only)
    view = aligned_block(BYTES, 4096)
    before = bytes_from_disk()
    pieces = (view[start : start + PIECE] for start in range(0, BYTES, PIECE))
    came = backend.read_cached(KEY, 0, BYTES, pieces)
    assert bytes_from_disk() - before < BYTES // 8
    backend.close()
    assert bytes(view) == ((folder / KEY).read_bytes() if came else bytes(BYTES))
    return came


def test_cached_object_is_read_without_the_disk(stored: Path) -> None:
    (stored / KEY).read_bytes()
    # at a moment in which the kernel moves or reclaims a page, that page is not there
    assert any(read_cached(stored) for _ in range(5))


def test_object_that_is_not_cached_is_read_from_the_disk_and_not_cached_then(stored: Path) -> None:
    assert not read_cached(stored)
    backend = PosixBackend(stored)
    before = bytes_from_disk()
    backend.read_into(KEY, 0, aligned_block(BYTES, 4096))
    assert bytes_from_disk() - before >= BYTES
    with (stored / KEY).open("rb") as file:
        assert not is_cached(file.fileno(), 0, BYTES)
    backend.close()


def test_cached_object_that_is_cut_short_while_it_is_read_is_an_error(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping would end the process here: what is read was asked for by size, and what came is counted."""
    (stored / KEY).read_bytes()
    real = system._read

    def cut(descriptor: int, view: memoryview, offset: int, *flags: int) -> int:
        os.truncate(stored / KEY, BYTES // 2)
        return real(descriptor, view, offset, *flags)

    backend = PosixBackend(stored)
    monkeypatch.setattr(system, "_read", cut)
    with pytest.raises(BackendError, match="it was cut short"):
        backend.read_cached(KEY, 0, BYTES, [aligned_block(BYTES, 4096)])
    backend.close()


def test_wrappers_pass_reads_of_the_page_cache_on(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(
        backend: PosixBackend, key: str, offset: int, end: int, views: list[memoryview]
    ) -> bool:
        views[0][:] = key[offset:end].encode()
        return True

    monkeypatch.setattr(PosixBackend, "read_cached", fill)
    backend = Retrying(PosixBackend(stored), RetryPolicy(), reads=RateLimiter(1))
    view = memoryview(bytearray(3))
    assert backend.read_cached(KEY, 4, 7, [view])
    assert bytes(view) == b"key"
    backend.close()
