"""The event log: what happens in a run, one JSON object a line, in a file that is bounded.

Whoever tells of an event only puts it on a queue. A thread of low importance writes; where the disk is full or slow,
events wait in memory, and beyond a bound they are lost, counted, and said once. Nothing here can fail a training run.
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

from tierfall.core.types import events
from tierfall.core.types.events import Event

logger = logging.getLogger("tierfall")

WAITING_MAX = 10_000
"""How many events wait in memory for a disk that is full or slow."""
BATCH_S = 0.1
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
NICENESS = 10
Wall = Callable[[float], float]
"""Turns the time of an event into seconds since 1970."""


def wall_time(at_s: float) -> float:
    """Say when that was, by this machine's clock, of a time of ``time.monotonic``."""
    return at_s + time.time() - time.monotonic()


def part_before(path: Path) -> Path:
    """Where the older part of a log lies."""
    return path.with_name(f"{path.name}.1")


class LogFile:
    """A file that lines are appended to. Past half of ``max_bytes`` it is renamed, over the part before it, and begun
    anew: what is on the disk is never more than ``max_bytes``, but for one line that is longer.

    Other processes may append to it, or move it away: each line goes to what has the name by then. A line that was torn
    by a death, or a disk that was full, is ended first, so that readers lose no more than that line.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._part_bytes = max_bytes // 2
        self._fd: int | None = None

    def append(self, lines: list[bytes]) -> int:
        """Append whole lines; returns how many are in the file. Raises OSError where not one is."""
        fd = self._opened()
        status = os.fstat(fd)
        taken = self._fitting(lines, status.st_size)
        if not taken:
            self._rotate()
            fd = self._opened()
            status = os.fstat(fd)
            taken = self._fitting(lines, 0)
        start = b"" if _is_whole(fd, status.st_size) else b"\n"
        data = start + b"".join(lines[:taken])
        done = data[: os.write(fd, data)]
        if len(done) == len(data):
            return taken
        return max(0, done.count(b"\n") - len(start))  # the rest is tried again, and tells why

    def _fitting(self, lines: list[bytes], size: int) -> int:
        """Count the lines that go into this part; an empty one takes any line."""
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
        # O_NONBLOCK: a pipe by that name must not make us wait; on a regular file it changes nothing.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(f"{self.path} is not a regular file")
        self._fd = fd
        return fd

    def _rotate(self) -> None:
        os.replace(self.path, part_before(self.path))
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_whole(fd: int, size: int) -> bool:
    """Say whether a file ends where a line does."""
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
    """Writes events as lines. ``put`` may be called from any thread, and never waits; ``lost`` counts what is nowhere.

    ``common`` are members that each line has: run, rank, process.
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
        self._warned = False
        self._lock = threading.Lock()
        self._told = 0
        self.lost = 0

    def put(self, event: Event) -> None:
        """Take an event; where too many wait, it is lost."""
        if self._queue.qsize() + len(self._lines) >= self._waiting_max:
            with self._lock:
                self.lost += 1
            return
        self._queue.put((self._wall(event.at_s), event))

    def start(self) -> None:
        # daemon: a disk that hangs must not keep a program from ending
        self._thread = threading.Thread(target=self._write, name="tierfall-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most; what is left then is lost."""
        if self._thread is None:
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._thread = None

    # The thread --------------------------------------------------------------------------------------

    def _write(self) -> None:
        _become_unimportant()
        retry_s = FIRST_RETRY_S
        while True:
            self._take(block=not self._lines)
            if self._append():
                retry_s = FIRST_RETRY_S
                if self._closing.is_set() and self._queue.empty() and not self._lines:
                    break
                self._closing.wait(BATCH_S)  # what comes meanwhile is written at once
            elif self._closing.is_set():
                break
            else:
                self._closing.wait(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        with self._lock:
            self.lost += len(self._lines)
        self._file.close()

    def _take(self, *, block: bool) -> None:
        """Make lines of what was put."""
        while block or not self._queue.empty():
            block = False
            if (item := self._queue.get()) is not None:
                self._lines.append(self._line(*item))

    def _line(self, wall_time_s: float, event: Event) -> bytes:
        line = {
            "format": events.FORMAT,
            "wall_time_s": round(wall_time_s, 3),
            **self._common,
            **events.event_to_json(event),
        }
        return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def _append(self) -> bool:
        """Append what waits; False where the file takes it not, or not all."""
        try:
            while self._lines:
                done = self._file.append(list(self._lines))
                for _ in range(done):
                    self._lines.popleft()
                if not done:
                    raise OSError("the file took less than a line: is its disk full?")
                self._report_lost()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "events: %s is not written: %s. Up to %d events wait in memory, what comes after them is lost, "
                    "and counted in statistics().lost_events; training goes on",
                    self._file.path,
                    error,
                    self._waiting_max,
                )
            return False
        return True

    def _report_lost(self) -> None:
        """Let the log itself say what it has not got."""
        with self._lock:
            count, self._told = self.lost - self._told, self.lost
        if count:
            now_s = time.monotonic()
            event = events.EventsLost(at_s=now_s, count=count)
            self._lines.append(self._line(self._wall(now_s), event))


def _become_unimportant() -> None:
    """Leave the cores to training, where the system lets a thread say so."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        except OSError as error:
            logger.debug("events: the thread keeps its priority: %s", error)


# Reading -------------------------------------------------------------------------------------------


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
