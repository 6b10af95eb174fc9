"""Files that are being written by path, until they become a checkpoint: each in anonymous memory of its own.

A file here has a descriptor that can be synced, so that whoever writes it needs not sync the whole machine. Nothing of
it is visible to anybody else, and its memory is free once nobody uses it.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch

from tierfall.core.types.errors import CapacityError, CaptureError, KeyNotFoundError, TierfallError
from tierfall.core.types.units import format_size


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
        """Open a file for writing, in the place of one of that name."""
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
        """Return each file's bytes. They keep their memory when this stage is freed. Raises CaptureError while a file
        is still being written."""
        with self._lock:
            unfinished = [file.name for file in self._files.values() if not file.closed]
            if unfinished or self._freed:
                what = (
                    f"{unfinished[0]} is still being written" if unfinished else "it was given up"
                )
                raise CaptureError(f"save of step {self.step} by path: {what}")
            return {name: file.tensor() for name, file in self._files.items()}

    def free(self) -> None:
        """Give up all files; what still writes to one of them fails."""
        with self._lock:
            self._freed = True
            for file in self._files.values():
                file.free()
            self._files.clear()

    def _grow(self, file: _StagedFile, end: int) -> None:
        """A file is to reach ``end``. Raises CapacityError where that is more than all may take."""
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
    """Anonymous memory, and how far it was written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.closed = False
        self.descriptor = _anonymous()

    def tensor(self) -> torch.Tensor:
        size = os.fstat(self.descriptor).st_size  # never beyond the end, whatever failed on the way
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def free(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _StagedStream(io.FileIO):
    """What writes a file; its descriptor is its own.

    What cannot be written is passed over, and is an error when the file is flushed or closed: ``torch.save``, which
    writes its archive's end whatever has failed before, would say something else of an error here.
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
    """A file that says, when it is flushed or closed, what could not be written."""

    raw: _StagedStream

    def flush(self) -> None:
        super().flush()
        if self.raw.failure is not None:
            raise self.raw.failure


def _anonymous() -> int:
    """Open a file without a name: in memory, or in the temporary folder where the system has no such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tierfall-by-path")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
