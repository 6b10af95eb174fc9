"""Files that this rank writes by path, until all ranks save them as a checkpoint.

Each file is anonymous memory with a descriptor of its own: a program that syncs it does not sync the whole machine, and
its memory is freed with its last user. Nothing here knows other ranks: ``by_path`` decides when files are freed.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tierfall.core.types.errors import CapacityError, CaptureError, KeyNotFoundError, TierfallError
from tierfall.core.types.units import format_size

_REMEMBERED = 16


class PathStages:
    """The staged files of this rank, of one step at a time, and why those of the last steps were freed. Thread-safe.

    ``limit_bytes`` is called when a step begins, once the memory of the step before is freed.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._stage: StagedFiles | None = None
        self._given_up: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)

    def begin(self, step: int) -> None:
        """Begin the files of a step, and free those of the step before."""
        with self._lock:
            self._free("another save by path began before it was finished")
            for known in [known for known in self._given_up if known[0] == step]:
                self._given_up.remove(known)
            self._stage = StagedFiles(step, limit_bytes=self._limit_bytes())

    def is_known(self, step: int) -> bool:
        """Return whether this step's files were begun, given up or not."""
        with self._lock:
            return self._is_staged(step) or self._was_given_up(step)

    def is_staged(self, step: int) -> bool:
        """Return whether this step's files are being written."""
        with self._lock:
            return self._is_staged(step)

    def of(self, step: int) -> StagedFiles:
        """Return the files of a step. Raises CaptureError where they were freed, or never begun."""
        with self._lock:
            if self._stage is None or self._stage.step != step:
                raise CaptureError(f"save of step {step} by path: {self._why_gone(step)}")
            return self._stage

    def check_kept(self, step: int) -> None:
        """Raise CaptureError where this rank's files of a step were freed, so that it cannot be saved."""
        with self._lock:
            if not self._is_staged(step) and self._was_given_up(step):
                raise CaptureError(f"save of step {step} by path: {self._why_gone(step)}")

    def pop(self, step: int) -> StagedFiles | None:
        """Return the files of a step, which the caller has to free; None where there are none."""
        with self._lock:
            if not self._is_staged(step):
                return None
            stage, self._stage = self._stage, None
            return stage

    def give_up(self, step: int, reason: str) -> None:
        """Free the files of a step, where there are any."""
        with self._lock:
            if self._is_staged(step):
                self._given_up.appendleft((step, reason))
                self._free(reason)

    def note_failed(self, step: int, reason: str) -> None:
        """Remember why a step was not saved."""
        with self._lock:
            self._given_up.appendleft((step, reason))

    def free(self, reason: str) -> None:
        """Free the files of whatever step is staged."""
        with self._lock:
            self._free(reason)

    # Under the lock ----------------------------------------------------------------------------------

    def _is_staged(self, step: int) -> bool:
        return self._stage is not None and self._stage.step == step

    def _was_given_up(self, step: int) -> bool:
        return any(of == step for of, _ in self._given_up)

    def _why_gone(self, step: int) -> str:
        why = next((reason for of, reason in self._given_up if of == step), "it was not begun here")
        return f"its files are gone: {why}"

    def _free(self, reason: str) -> None:
        if self._stage is not None:
            if self._stage.names():
                self._given_up.appendleft((self._stage.step, reason))
            self._stage.free()
            self._stage = None


class StagedFiles:
    """The files of one step on this rank. Thread-safe; ``limit_bytes`` bounds all of them together."""

    def __init__(self, step: int, *, limit_bytes: int) -> None:
        self.step = step
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: dict[str, _StagedFile] = {}
        self._freed = False

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._files)

    def create(self, name: str) -> io.BufferedWriter:
        """Open a file for writing; it replaces one of that name."""
        with self._lock:
            if self._freed:
                raise CaptureError(f"{name} of step {self.step}: its save was given up")
            if (old := self._files.pop(name, None)) is not None:
                old.free()
            file = self._files[name] = _StagedFile(name)
            return _StagedWriter(_StagedStream(file, self._grow))

    def rename(self, name: str, target: str) -> None:
        with self._lock:
            if name not in self._files:
                raise KeyNotFoundError(f"{name} of step {self.step} was not written")
            self._files[target] = self._files.pop(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return each file's bytes. They stay valid when the files are freed. Raises CaptureError while a file is still
        being written."""
        with self._lock:
            unfinished = [file.name for file in self._files.values() if not file.closed]
            if unfinished or self._freed:
                what = (
                    f"{unfinished[0]} is still being written" if unfinished else "it was given up"
                )
                raise CaptureError(f"save of step {self.step} by path: {what}")
            return {name: file.tensor() for name, file in self._files.items()}

    def free(self) -> None:
        """Free all files; later writes to them fail."""
        with self._lock:
            self._freed = True
            for file in self._files.values():
                file.free()
            self._files.clear()

    def _grow(self, file: _StagedFile, end: int) -> None:
        """Let a file reach ``end`` bytes. Raises CapacityError where all files together exceed the limit."""
        with self._lock:
            if self._freed:
                raise CaptureError(f"{file.name} of step {self.step}: its save was given up")
            others = sum(other.bytes for other in self._files.values() if other is not file)
            if others + end > self._limit_bytes:
                raise CapacityError(
                    f"save of step {self.step} by path: {file.name} takes this rank's files beyond "
                    f"{format_size(self._limit_bytes)} ({self._limit_bytes} bytes), which is the capacity of the host "
                    "tier, or half of the memory that was free where it has none: set a capacity that holds two "
                    "checkpoints"
                )
            file.bytes = max(file.bytes, end)


class _StagedFile:
    """Anonymous memory; ``bytes`` were written so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.closed = False
        self.descriptor = _open_anonymous()

    def tensor(self) -> torch.Tensor:
        size = os.fstat(self.descriptor).st_size  # not ``bytes``: the last write may have failed
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def free(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _StagedStream(io.FileIO):
    """The stream that writes a file, by a descriptor of its own.

    A failed write is skipped, and raised when the file is flushed or closed: ``torch.save`` writes the end of its
    archive whatever has failed before, and would hide an error that is raised here.
    """

    def __init__(self, file: _StagedFile, grow: Callable[[_StagedFile, int], None]) -> None:
        super().__init__(os.dup(file.descriptor), "wb")
        self._file = file
        self._grow = grow
        self.failure: OSError | TierfallError | None = None

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            self._grow(self._file, self.tell() + size)
            return super().write(data)
        except (OSError, TierfallError) as error:
            self.failure = self.failure or error
        self.seek(size, io.SEEK_CUR)
        return size

    def close(self) -> None:
        super().close()
        self._file.closed = self.failure is None


class _StagedWriter(io.BufferedWriter):
    """Raises, when it is flushed or closed, what kept bytes from being written."""

    raw: _StagedStream

    def flush(self) -> None:
        super().flush()
        if self.raw.failure is not None:
            raise self.raw.failure


def _open_anonymous() -> int:
    """Open a file without a name: in memory, or in the temporary folder on systems without such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tierfall-by-path")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
