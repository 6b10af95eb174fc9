"""Reading an event log, also while it is written: what is no whole line of JSON is skipped."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from tierfall.telemetry.event_log import part_before

READ_BYTES = 1 << 20


class LogTail:
    """Follows a log over the moves of its file; ``read`` gives what was added since the last call.

    The first call gives what is there, the part before it included. A line is given once its end is there; a torn one,
    which another line follows, is skipped. Raises OSError where the file is there and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._rest = b""
        self._begun = False

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            self._open_first()
        for _ in range(3):  # the file may be moved twice while this reads
            if self._fd is not None:
                found += self._new_lines(self._fd)
            if not self._open_next():
                break
        return found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_first(self) -> None:
        for path in (part_before(self._path), self._path):
            if (fd := _opened(path)) is not None:
                self._fd = fd
                return

    def _open_next(self) -> bool:
        """Go on with the part after this one, if there is one."""
        fd = _opened(self._path)
        if fd is None:
            return False
        if self._fd is not None and os.path.sameopenfile(fd, self._fd):
            os.close(fd)
            return False
        self.close()
        self._fd, self._rest = fd, b""
        return True

    def _new_lines(self, fd: int) -> list[dict[str, Any]]:
        found = []
        while data := os.read(fd, READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [event for line in lines if (event := _parsed(line)) is not None]
        return found


def last_events(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the last events of a log, oldest first; none where there is no log."""
    tail = LogTail(path)
    try:
        return list(deque(tail.read(), count))
    finally:
        tail.close()


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
