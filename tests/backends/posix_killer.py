"""Publishes one object again and again, killed a little later each time; run as a process of its own.

Usage: posix_killer.py ROOT MODE DIRECT. Below ROOT one folder per death is left behind: 0, 1, 2, ... as the dead left
it; the last one is that of the child that lived to its end. The name of the call before which each died is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.toolkit.views import aligned_block
from tierfall.core.types.backend import Publish

CALLS = ("open", "pwrite", "fsync", "close", "replace", "link", "unlink", "mkdir", "dup")
PIECE_BYTES = 512 * 1024
LENGTH = 2 * PIECE_BYTES + 100
DEATHS_MAX = 200


class Countdown:
    """Kills this process at its n-th step; a write is two steps, and dies in the middle at the second."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def arm(self) -> None:
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            self._step(name)
            if name == "pwrite":
                descriptor, view, offset = args
                self._step(
                    "the end of pwrite", lambda: real(descriptor, view[: half(view)], offset)
                )
            return real(*args, **more)

        return call

    def _step(self, name: str, before: Callable[[], object] = lambda: None) -> None:
        if self._left == 0:
            before()
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def half(view: memoryview) -> int:
    return view.nbytes // 8192 * 4096


def publish(root: Path, mode: Publish, *, direct_io: bool, steps: int) -> None:
    backend = PosixBackend(root, direct_io=direct_io)
    data = aligned_block(LENGTH, 4096)
    data[:] = b"n" * LENGTH
    Countdown(steps).arm()
    with backend.create("run/new/key", length=LENGTH, publish=mode) as writer:
        for start in range(0, LENGTH, PIECE_BYTES):
            writer.write(start, data[start : start + PIECE_BYTES])
        writer.publish()


def main() -> None:
    root, mode, direct_io = Path(sys.argv[1]), Publish(sys.argv[2]), sys.argv[3] == "direct"
    for steps in range(DEATHS_MAX):
        folder = root / str(steps)
        folder.mkdir(parents=True)
        if mode is Publish.REPLACE:
            (folder / "run" / "new").mkdir(parents=True)
            (folder / "run" / "new" / "key").write_bytes(b"old")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                publish(folder, mode, direct_io=direct_io, steps=steps)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status != signal.SIGKILL:
            sys.exit(status)
    sys.exit(1)


if __name__ == "__main__":
    main()
