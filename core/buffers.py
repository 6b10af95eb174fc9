"""Page-aligned buffers that are taken once and used again: what reads from storage go through.

Anonymous mappings, so that direct I/O takes them as they are; nothing large is allocated or freed in steady state.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BufferPool:
    """Buffers of one size, at most ``count`` of them, allocated when first needed."""

    def __init__(self, *, bytes: int, count: int) -> None:
        self.bytes = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._left = count
        self._free: list[memoryview] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self, bytes: int) -> Iterator[memoryview]:
        """Lend a buffer of at least ``bytes`` bytes, waiting for one if all are out.

        What is larger than the pool's buffers is allocated for this once.
        """
        if bytes > self.bytes:
            yield memoryview(mmap.mmap(-1, -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE))
            return
        buffer = self._take()
        try:
            yield buffer
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def _take(self) -> memoryview:
        with self._changed:
            while not self._free and not self._left:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            self._left -= 1
        return memoryview(mmap.mmap(-1, self.bytes))
