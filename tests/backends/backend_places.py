"""Backends of every kind for the tests of this folder, and small helpers that use no production code."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.memory_backend import MemoryBackend
from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.views import aligned_block
from tierfall.backends.wrappers import Retrying, RetryPolicy
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types.backend import Backend, Publish

CHUNK_BYTES = 1024 * 1024

Wrap = Callable[[Backend], Backend]


def no_sleep(wait_s: float) -> None:
    """Stand in for time.sleep."""


def retrying(inner: Backend) -> Backend:
    return Retrying(inner, RetryPolicy(tries=3, sleep=no_sleep, rng=Random(0)))


def wrapped(inner: Backend) -> Backend:
    writes = RateLimiter(1_000_000, sleep=no_sleep)
    return Retrying(inner, RetryPolicy(sleep=no_sleep, rng=Random(0)), writes=writes)


WRAPS: dict[str, Wrap] = {"bare": lambda inner: inner, "wrapped": wrapped}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to make one kind of backend below a folder of the test's own."""

    medium: str
    around: Wrap

    def maker(self, folder: Path) -> Callable[[], Backend]:
        numbers = count()
        if self.medium == "memory":
            return lambda: self.around(MemoryBackend())
        return lambda: self.open(folder / f"tier-{next(numbers)}")

    def open(self, root: Path) -> Backend:
        return self.around(PosixBackend(root, direct_io=self.medium == "direct"))

    def reopen(self, backend: Backend) -> Backend:
        return self.open(Path(backend.place))

    @property
    def reopener(self) -> Callable[[Backend], Backend] | None:
        return None if self.medium == "memory" else self.reopen


KINDS = {
    f"{medium}-{name}": Kind(medium=medium, around=WRAPS[name])
    for medium, name in (("memory", "bare"), ("direct", "bare"), ("buffered", "wrapped"))
}


def files_below(root: Path) -> list[str]:
    """Every name that is no folder, relative to the root, as the operating system shows it."""
    return sorted(
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, names in os.walk(root)
        for name in names
    )


def put(backend: Backend, key: str, data: bytes, *, publish: Publish = Publish.REPLACE) -> None:
    with backend.create(key, length=len(data), publish=publish) as writer:
        writer.write(0, memoryview(data))
        writer.publish()


def get(backend: Backend, key: str) -> bytes:
    view = memoryview(bytearray(backend.stat(key).bytes))
    backend.read_into(key, 0, view)
    return bytes(view)


OPERATIONS: dict[str, Callable[[Backend], object]] = {
    "read": lambda backend: backend.read_into("run/key", 0, memoryview(bytearray(1))),
    "stat": lambda backend: backend.stat("run/key"),
    "scan": lambda backend: list(backend.scan("run/")),
    "delete": lambda backend: backend.delete("run/key"),
    "delete some": lambda backend: backend.delete_some(["run/key", "run/other"]),
    "discard": lambda backend: backend.discard_unfinished("run/"),
    "put": lambda backend: put(backend, "run/key", b"bytes"),
    "put long": lambda backend: put(backend, "run/key", bytes(9 * CHUNK_BYTES)),
}


@contextmanager
def powerless() -> Iterator[None]:
    """Give up root's rights for a block, where this process has them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def fail(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    when: Callable[..., bool] = lambda *args, **more: True,
) -> None:
    """Let ``os.<name>`` fail with an errno where ``when``, called with its arguments, says so."""
    real = getattr(os, name)

    def stand_in(*args: object, **more: object) -> object:
        if when(*args, **more):
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    monkeypatch.setattr(os, name, stand_in)


def is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def chunk() -> memoryview:
    view = aligned_block(CHUNK_BYTES, 4096)
    view[:] = b"\x5a" * CHUNK_BYTES
    return view


def root_of(backend: PosixBackend) -> Path:
    return Path(backend.place)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
