"""The event log: the events of a run, one JSON object per line, in a file of bounded size; writing and reading it.

The journal passes events to ``LogFile.write`` on a thread of its own. Nothing here can fail a training run.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types import events
from tierfall.core.types.events import Event

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


def wall_time(at_s: float) -> float:
    """Convert a time of ``time.monotonic`` to seconds since 1970, by this machine's clock."""
    return at_s + time.time() - time.monotonic()


def to_line(wall_time_s: float, event: Event, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an event's line. ``common`` are those of every line, such as run and rank."""
    return {
        "format": events.FORMAT,
        "wall_time_s": round(wall_time_s, 3),
        **common,
        **events.event_to_json(event),
    }


def older_half(path: Path) -> Path:
    """Return the path of the older half of a log."""
    return path.with_name(f"{path.name}.1")


class LogFile:
    """A file that events are appended to as lines. Beyond half of ``max_bytes`` it is rotated: renamed over the older
    half. Both take ``max_bytes`` at most, unless one line is longer.

    Other processes may append to it, or move it away: each line is written to the file that has the name then. A torn
    line, of a killed process or a full disk, is ended first, so that readers lose only that line.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.closing = threading.Event()
        """Once it is set, a line that the disk does not accept is not tried again."""
        self._part_bytes = max_bytes // 2
        self._conditions = Conditions()

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event, and wait for a disk that is full or refuses it."""
        line = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self.append(line)
                break
            except OSError as error:
                self._conditions.report(
                    "file", logging.WARNING,
                    "events: %s is not written: %s. Events wait in memory; if too many wait, later ones are lost, and "
                    "counted in statistics().lost_events; training continues",
                    self.path, error,
                )  # fmt: skip
            if self.closing.is_set():
                return
            self.closing.wait(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._conditions.end("file", "events: %s is written again", self.path)

    def append(self, line: bytes) -> None:
        """Append a line. Raises OSError if it could not be written whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: opening a pipe of that name must not wait; it has no effect on a regular file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o666)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self.path} is not a regular file")
            if is_full := 0 < status.st_size >= self._part_bytes - len(line):
                os.replace(self.path, older_half(self.path))
            else:
                is_whole = status.st_size == 0 or os.pread(fd, 1, status.st_size - 1) == b"\n"
                data = line if is_whole else b"\n" + line
                if os.write(fd, data) < len(data):
                    raise OSError("less than a line was written: is the disk full?")
        finally:
            os.close(fd)
        if is_full:
            self.append(line)


# Reading -------------------------------------------------------------------------------------------


class LogTail:
    """Follows a log over rotations of its file; ``read`` returns the events that were added since the last call.

    The first call returns all that are there, the older half included. A line is returned once it has its end; a line
    that is no JSON object, such as a torn one, is skipped. Raises OSError if the file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with ExitStack() as opened:
            files = [_open(path, opened) for path in (older_half(self._path), self._path)]
            there = [(os.fstat(file.fileno()).st_ino, file) for file in files if file is not None]
            read = next((i for i, (inode, _) in enumerate(there) if inode == self._inode), 0)
            for inode, file in there[read:]:
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                lines = file.read().split(b"\n")[:-1]
                self._offset += sum(len(line) + 1 for line in lines)
                found += [event for line in lines if (event := _parsed(line)) is not None]
        return found


def _open(path: Path, opened: ExitStack) -> BinaryIO | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    return opened.enter_context(os.fdopen(fd, "rb"))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
