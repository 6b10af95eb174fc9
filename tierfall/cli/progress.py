"""Progress of a long command, for a person who watches: how much, how fast, how long still."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """A bar with rate and time left; shows nothing where nobody watches. Thread-safe."""

    def __init__(self, label: str, total: int, *, shown: bool) -> None:
        """``total`` counts bytes."""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            transient=True,
            disable=not shown,
        )
        self._task: TaskID = self._progress.add_task(label, total=total)
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._progress.advance(self._task, count)

    def set(self, done: int, total: int) -> None:
        with self._lock:
            self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
