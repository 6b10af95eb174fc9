"""The progress of what moves bytes: a restore, a load, or a command.

While it lasts, a terminal has a line of it, which is drawn again each second; elsewhere there is a line every ten
seconds. The same line is in a file beside the run's host memory, for ``tierfall watch``. What takes less than a second
shows nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.units import format_duration, format_rate, format_size

logger = logging.getLogger("tierfall")
Watch = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""
EVERY_S = 1.0
LINE_EVERY_S = 10.0
RATE_OVER_S = 10.0
"""The rate is that of the last ten seconds."""
STALE_S = 5.0
"""A file that was not written for so long is that of a dead process."""
LINE_BYTES_MAX = 1000
_FILES = "progress-*.txt"
_numbers = itertools.count()


class Progress:
    """Counts the bytes that several threads have done, and reports them with ``total``, the bytes in total."""

    def __init__(self, watch: Watch, total: int = 0) -> None:
        self._watch = watch
        self.total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count  # what was tried again counts twice
            self._watch(min(self._done, self.total), self.total)

    def expect(self, count: int) -> None:
        """So many bytes more are to be done."""
        with self._lock:
            self.total = self._done + count
            self._watch(self._done, self.total)


@contextmanager
def shown(
    what: str, folder: Callable[[], Path], say: Callable[[str], None], *, first_s: float
) -> Iterator[Watch]:
    """Show the progress of ``what`` during the block; give what moves it, from any thread. ``say`` gets the lines
    beside the terminal's, the first after ``first_s`` seconds. ``folder`` returns that of the run's host memory."""
    display = _Display(what, folder, say, first_s)
    thread = threading.Thread(target=display.run, name="tierfall-progress", daemon=True)
    with suppress(RuntimeError):  # at the limit of threads nothing is shown
        thread.start()
    try:
        yield display.move
    finally:
        display.ended.set()
        if thread.ident is not None:
            thread.join(EVERY_S)


@contextmanager
def reading(doing: str, tally: ReadTally, folder: Callable[[], Path]) -> Iterator[None]:
    """Show the progress of what is read by a tally during the block, in the log, too."""
    say = partial(logger.info, "%s")
    with shown(doing, folder, say, first_s=EVERY_S) as watch:
        counter = Progress(watch)
        tally.on_planned, tally.on_bytes = counter.expect, counter.add
        yield


class _Display:
    def __init__(
        self, what: str, folder: Callable[[], Path], say: Callable[[str], None], first_s: float
    ) -> None:
        self.ended = threading.Event()
        self._what, self._say = what, say
        self._folder: Callable[[], Path] | None = folder
        self._file: Path | None = None
        self._done = self._total = 0
        self._seen = deque([(time.monotonic(), 0)])
        self._due_s = time.monotonic() + first_s

    def move(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def run(self) -> None:
        """Draw until the end, on a thread of its own."""
        line = ""
        while not self.ended.wait(EVERY_S):
            line = f"{self._what}: {self._describe()}"
            _draw(line)
            self._write(f"{line} (process {os.getpid()})")
            if time.monotonic() >= self._due_s:
                self._due_s = time.monotonic() + LINE_EVERY_S
                self._say(line)
        if line:
            _draw("")
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()

    def _describe(self) -> str:
        done, total, now_s = self._done, self._total, time.monotonic()
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - RATE_OVER_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        self._seen.append((now_s, done))
        parts = [f"{format_size(done)} of {format_size(total)}" if total else "waiting"]
        if (rate := (done - before) / (now_s - then_s)) > 0:
            left = format_duration(max(1, round((total - done) / rate)))
            parts += [format_rate(rate), f"about {left} left"]
        return ", ".join(parts)

    def _write(self, line: str) -> None:
        """Replace this work's file for ``watch``; where that fails, there is none."""
        try:
            if self._file is None and self._folder is not None:
                where, self._folder = self._folder(), None
                for path in where.glob("progress-*"):
                    if not _is_fresh(path):
                        path.unlink()
                if where.is_dir():
                    self._file = where / f"progress-{os.getpid()}-{next(_numbers)}.txt"
            if self._file is not None:
                fresh = self._file.with_suffix(".new")
                fresh.write_text(line)
                os.replace(fresh, self._file)
        except (OSError, TierfallError) as error:
            logger.debug("the progress is not written for watch: %s", error)
            self._file = None


def _draw(line: str) -> None:
    """Replace the last line of the terminal, if there is one."""
    with suppress(AttributeError, ValueError, OSError):  # a daemon has no stderr, or has closed it
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            width = shutil.get_terminal_size().columns
            sys.stderr.write(f"\r\x1b[K{line[: width - 1]}\r")
            sys.stderr.flush()


def _is_fresh(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < STALE_S


def progress_in(folder: Path) -> tuple[str, ...]:
    """Return the lines of what moves bytes of a run now, on this machine; ``folder`` is that of its host memory."""
    found: list[str] = []
    with suppress(OSError):  # what prevents that is a problem of the listing, too
        for path in sorted(folder.glob(_FILES)):
            with suppress(FileNotFoundError, ValueError):  # it has just ended
                if _is_fresh(path):
                    with path.open() as file:
                        found.append(file.read(LINE_BYTES_MAX))
    return tuple(found)
