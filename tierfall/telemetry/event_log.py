"""The event log: the events of a run, one JSON object per line, in a file of bounded size; writing and reading it.

``EventLog.put`` only appends to a queue; a thread of low priority writes. While the disk is full or slow, events wait
in memory; beyond a bound they are lost, counted, and reported once. Nothing here can fail a training run.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tierfall.core.runtime.conditions import Conditions
from tierfall.core.types import events
from tierfall.core.types.events import Event

logger = logging.getLogger("tierfall")

WAITING_MAX = 10_000
"""Events that may wait in memory for a disk that is full or slow."""
BATCH_S = 0.1
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
NICENESS = 10
Wall = Callable[[float], float]
"""Converts the time of an event to seconds since 1970."""


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
    """A file that lines are appended to. Beyond half of ``max_bytes`` it is rotated: renamed over the older half. Both
    take ``max_bytes`` at most, unless one line is longer.

    Other processes may append to it, or move it away: each line is written to the file that has the name then. A torn
    line, of a killed process or a full disk, is ended first, so that readers lose only that line.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._part_bytes = max_bytes // 2
        self._fd: int | None = None

    def append(self, lines: list[bytes]) -> int:
        """Append whole lines; return how many were written. Raises OSError where none was."""
        fd = self._opened()
        status = os.fstat(fd)
        fitting = self._fitting(lines, status.st_size)
        if not fitting:
            self._rotate()
            fd = self._opened()
            status = os.fstat(fd)
            fitting = self._fitting(lines, 0)
        start = b"" if _is_whole(fd, status.st_size) else b"\n"
        data = start + b"".join(lines[:fitting])
        done = data[: os.write(fd, data)]
        if len(done) == len(data):
            return fitting
        return max(
            0, done.count(b"\n") - len(start)
        )  # the rest is tried again, which raises the error

    def _fitting(self, lines: list[bytes], size: int) -> int:
        """Return how many lines fit into a file of ``size`` bytes; an empty one accepts a line of any length."""
        count, end = 0, size + 1
        for line in lines:
            end += len(line)
            if end > self._part_bytes and (size or count):
                break
            count += 1
        return count

    def _opened(self) -> int:
        if self._fd is not None and _identity(self._fd) == _identity_at(self.path):
            return self._fd
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: opening a pipe of that name must not wait; it has no effect on a regular file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(f"{self.path} is not a regular file")
        self._fd = fd
        return fd

    def _rotate(self) -> None:
        os.replace(self.path, older_half(self.path))
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_whole(fd: int, size: int) -> bool:
    """Whether a file ends with a whole line."""
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _identity_at(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class EventLog:
    """Writes events as lines. ``put`` may be called from any thread, and never waits; ``lost`` counts dropped events.

    ``common`` are members of every line, such as run and rank.
    """

    def __init__(
        self,
        file: LogFile,
        *,
        common: Mapping[str, Any],
        wall: Wall = wall_time,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self._file = file
        self._common = dict(common)
        self._wall = wall
        self._waiting_max = waiting_max
        self._queue: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self._lines: deque[bytes] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._conditions = Conditions()
        self._lock = threading.Lock()
        self._lost_reported = 0
        self.lost = 0

    def put(self, event: Event) -> None:
        """Add an event; where too many wait, it is lost."""
        if self._queue.qsize() + len(self._lines) >= self._waiting_max:
            with self._lock:
                self.lost += 1
            return
        self._queue.put((self._wall(event.at_s), event))

    def start(self) -> None:
        # daemon: a disk that hangs must not stop a program from ending
        self._thread = threading.Thread(target=self._write, name="tierfall-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write the waiting events for ``timeout_s`` seconds at most; the rest is lost."""
        if self._thread is None:
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._thread = None

    # The thread --------------------------------------------------------------------------------------

    def _write(self) -> None:
        _lower_priority()
        retry_s = FIRST_RETRY_S
        while True:
            self._take(block=not self._lines)
            if self._append():
                retry_s = FIRST_RETRY_S
                if self._closing.is_set() and self._queue.empty() and not self._lines:
                    break
                self._closing.wait(BATCH_S)  # events of this time are written together
            elif self._closing.is_set():
                break
            else:
                self._closing.wait(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        with self._lock:
            self.lost += len(self._lines)
        self._file.close()

    def _take(self, *, block: bool) -> None:
        """Format the events of the queue as lines; ``block``: wait for the first."""
        while block or not self._queue.empty():
            block = False
            if (item := self._queue.get()) is not None:
                self._lines.append(self._line(*item))

    def _line(self, wall_time_s: float, event: Event) -> bytes:
        line = to_line(wall_time_s, event, self._common)
        return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def _append(self) -> bool:
        """Append the waiting lines; return False where the file did not accept all."""
        try:
            while self._lines:
                done = self._file.append(list(self._lines))
                for _ in range(done):
                    self._lines.popleft()
                if not done:
                    raise OSError("less than a line was written: is the disk full?")
                self._report_lost()
        except OSError as error:
            self._conditions.report(
                "file", logging.WARNING,
                "events: %s is not written: %s. At most %d events wait in memory; later ones are lost, and counted in "
                "statistics().lost_events; training continues",
                self._file.path, error, self._waiting_max,
            )  # fmt: skip
            return False
        text = "events: %s is written again; lost so far: %d events"
        self._conditions.end("file", text, self._file.path, self.lost)
        return True

    def _report_lost(self) -> None:
        """Write an event with the number of events lost since the last such event."""
        with self._lock:
            count, self._lost_reported = self.lost - self._lost_reported, self.lost
        if count:
            now_s = time.monotonic()
            event = events.EventsLost(at_s=now_s, count=count)
            self._lines.append(self._line(self._wall(now_s), event))


def _lower_priority() -> None:
    """Set the thread's priority below that of training, where the system allows it per thread."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        except OSError as error:
            logger.debug("events: the priority of the thread was not lowered: %s", error)


# Reading -------------------------------------------------------------------------------------------


READ_BYTES = 1 << 20


class LogTail:
    """Follows a log over rotations of its file; ``read`` returns the events that were added since the last call.

    The first call returns all that are there, the older half included. A line is returned once it has its end; a line
    that is no JSON object, such as a torn one, is skipped. Raises OSError where the file exists and cannot be read.
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
        for _ in range(3):  # the file may be rotated twice meanwhile
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
        for path in (older_half(self._path), self._path):
            if (fd := _opened(path)) is not None:
                self._fd = fd
                return

    def _open_next(self) -> bool:
        """Continue with the file that has the name now; return False where it is the open one, or missing."""
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
