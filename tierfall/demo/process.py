"""A trainer process as the demo holds it: started, followed, frozen for a look, killed, waited for.

It knows processes and event files, not tiers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tierfall.demo.events import Event, EventReader

POLL_S = 0.01
STDERR_LINES = 20


class DemoError(Exception):
    """The demo did not show what it was to show; the message says what was expected and what to do."""


_started: list[subprocess.Popen[bytes]] = []


def start(command: list[str], output: IO[bytes], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ``none_left`` knows of from its first moment, whenever an interrupt comes.

    It has SIGINT blocked, as this one has until it is known. Call it in the main thread.
    """
    came: list[int] = []
    # Blocking it is not enough here: another thread, torch's or obstore's, takes the signal, and Python then runs the
    # handler in the main thread all the same.
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options
        )
        _started.append(process)
        return process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def none_left() -> Iterator[None]:
    """Leaving the ``with`` kills each process that was started within it and still lives."""
    before = len(_started)
    try:
        yield
    finally:
        for process in _started[before:]:
            process.kill()
            process.wait()
        del _started[before:]


class Trainer:
    """One run of ``tierfall.demo.trainer``. Leaving the ``with`` kills it, if it still lives."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path,
        config: Path | None,
        steps: int,
        small: bool,
        pace_s: float = 0.0,
    ) -> None:
        """``name`` names its files in ``folder``; without ``config`` it saves nothing."""
        self._name = name
        self._stderr = folder / f"{name}.log"
        events = folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "tierfall.demo.trainer", "--steps", str(steps)]
        command += ["--log", str(events)]
        command += ["--config", str(config)] if config else []
        command += ["--small"] if small else []
        command += ["--pace", str(pace_s)]
        self._reader = EventReader(events)
        self._read: deque[Event] = deque()
        self.began_s = time.monotonic()
        with self._stderr.open("wb") as stderr:
            self._process = start(command, stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    def follow(self) -> Iterator[Event]:
        """Yield events as they come, until the process ends; DemoError where it ends badly."""
        while True:
            ended = self._process.poll() is not None
            self._read += self._reader.read()
            while self._read:
                yield self._read.popleft()
            if ended:
                break
            time.sleep(POLL_S)
        if self._process.returncode:
            raise DemoError(
                f"the trainer {self._name!r} ended with code {self._process.returncode}; its last words "
                f"(all of them are in {self._stderr}):\n{self._last_words()}"
            )

    def _last_words(self) -> str:
        lines = self._stderr.read_text(errors="replace").splitlines()
        return "\n".join(lines[-STDERR_LINES:])

    def freeze(self) -> bool:
        """Stop every thread of it where it is; False where it had ended already."""
        try:
            os.kill(self.pid, signal.SIGSTOP)
            # WNOWAIT leaves the ending, if it is one, for Popen to find.
            seen = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except (ProcessLookupError, ChildProcessError):
            return False
        return seen is not None and seen.si_code == os.CLD_STOPPED

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> list[Event]:
        """SIGKILL it, and return what it wrote before and ``follow`` has not yielded."""
        self._process.kill()
        self._process.wait()
        return [*self._read, *self._reader.read()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
