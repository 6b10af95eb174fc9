"""A trainer process from the demo's side: started, followed, stopped for inspection, killed, waited for.

Its actions are read from two logs: its own lines of output, and the event log of its run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tierfall.core.types.values import CheckpointId
from tierfall.telemetry.event_log import LogTail

POLL_S = 0.01
STDERR_LINES = 20

Line = dict[str, Any]
"""A line of a log, with its ``kind`` and ``wall_time_s``."""


def id_of(line: Line) -> CheckpointId:
    """Return the checkpoint that a line is about."""
    return CheckpointId(line["step"], line["attempt"])


class DemoError(Exception):
    """An act had another result than expected; the message names the expected result, and what to do."""


_started: list[subprocess.Popen[bytes]] = []


def start(command: list[str], output: IO[bytes], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ``kill_leftovers`` knows of, even if an interrupt comes at any moment.

    SIGINT is blocked in the process, and in this one until it is known. Call it in the main thread.
    """
    interrupts: list[int] = []
    # Blocking it in this thread is not enough: the signal is delivered to another thread, such as torch's, and
    # Python then runs the handler in the main thread nevertheless.
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
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
        if interrupts:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def kill_leftovers() -> Iterator[None]:
    """Kill, at the end of the ``with``, each process that was started in it and is still running."""
    before = len(_started)
    try:
        yield
    finally:
        for process in _started[before:]:
            process.kill()
            process.wait()
        del _started[before:]


@dataclass(slots=True, kw_only=True)
class Act:
    """The actions of one trainer process, in the order in which they were read. Times are seconds since 1970.

    ``lines`` holds its own (see ``trainer``) and those of the run's event log (see ``docs/event-log.md``).
    """

    began_s: float
    over_s: float = 0.0
    was_killed: bool = False
    lines: list[Line] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] in kinds]

    @property
    def restored(self) -> Line | None:
        """The checkpoint that it restored; None if it restored none."""
        return next((line["restored"] for line in self.of("ready")), None)

    def fingerprint(self, kind: str) -> str:
        """Return the digest of its state when it was ``ready``, or had ``ended``."""
        for line in self.of(kind):
            return str(line["fingerprint"])
        raise DemoError(f"a trainer ended without a line {kind!r}; see the logs")


class Trainer:
    """One run of ``tierfall.demo.trainer``. Leaving the ``with`` kills it if it is still running."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path,
        config: Path | None,
        steps: int,
        small: bool,
        pace_s: float = 0.0,
        events: LogTail | None = None,
    ) -> None:
        """``name`` names its files in ``folder``; without ``config`` it saves nothing. ``events`` reads the event log
        of its run, from its present position on."""
        self._name = name
        self._stderr = folder / f"{name}.log"
        own = folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "tierfall.demo.trainer", "--steps", str(steps)]
        command += ["--log", str(own)]
        command += ["--config", str(config)] if config else []
        command += ["--small"] if small else []
        command += ["--pace", str(pace_s)]
        self._own = LogTail(own)
        self._tails = (self._own, events) if events else (self._own,)
        self.act = Act(began_s=time.time())
        with self._stderr.open("wb") as stderr:
            self._process = start(command, stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> list[Line]:
        """Return, and add to the act, what was written since the last call."""
        lines = [line for tail in self._tails for line in tail.read()]
        self.act.lines += lines
        return lines

    def follow(self) -> Iterator[Line]:
        """Yield lines as they are written, until the process ends; DemoError if it fails."""
        ended = False
        while not ended:
            ended = self._process.poll() is not None
            yield from self.read()
            if not ended:
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
        """Stop all of its threads; False if it has ended already."""
        try:
            os.kill(self.pid, signal.SIGSTOP)
            # With WNOWAIT, Popen can still wait for a process that has ended.
            seen = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except (ProcessLookupError, ChildProcessError):
            return False
        return seen is not None and seen.si_code == os.CLD_STOPPED

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it, and read what it wrote before."""
        self.act.was_killed, self.act.over_s = True, time.time()
        self._process.kill()
        self._process.wait()
        self.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.act.over_s = self.act.over_s or time.time()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._own.close()
