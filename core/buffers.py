"""Page-aligned buffers that are taken once and used again: what reads from storage go through.

Anonymous mappings, so that direct I/O takes them as they are; nothing large is allocated or freed in steady state.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HUGE_PAGE_BYTES = 2 << 20
# Linux 4.14; the mmap module does not name it.
_MADV_WIPEONFORK = 18


class BufferPool:
    """Buffers of one size, at most ``count`` of them, allocated when first needed."""

    def __init__(self, *, bytes: int, count: int) -> None:
        self.bytes = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._left = count
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @contextmanager
    def take(self, bytes: int) -> Iterator[memoryview]:
        """Lend a buffer of at least ``bytes`` bytes, waiting for one if all are out.

        What is larger than the pool's buffers is allocated for this once.
        """
        if bytes > self.bytes:
            yield allocate(bytes)
            return
        buffer = self._take()
        try:
            yield buffer
        finally:
            self._free.put(buffer)

    def _take(self) -> memoryview:
        """None in the queue says that a place came free without a buffer: whoever gets it looks again."""
        while True:
            with suppress(queue.Empty):
                if (buffer := self._free.get_nowait()) is not None:
                    return buffer
                continue
            with self._lock:
                fresh = self._left > 0
                self._left -= fresh
            if fresh:
                return self._allocate()
            if (buffer := self._free.get()) is not None:
                return buffer

    def _allocate(self) -> memoryview:
        try:
            return allocate(self.bytes)
        except BaseException:
            with self._lock:
                self._left += 1
            self._free.put(None)
            raise


def allocate(bytes: int) -> memoryview:
    """Map anonymous memory, on huge pages where the system gives them: direct I/O pins every page that it fills.

    The mapping is private, since the kernel gives shared ones no huge pages by default. A forked child finds zeros
    there: no page is shared with it, which could lead a direct read under way into the wrong one (open(2), O_DIRECT).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, bytes + HUGE_PAGE_BYTES, flags=flags)
    mapping.madvise(_MADV_WIPEONFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # a system without them: the same memory, in small pages
        return memoryview(mapping)[:bytes]
    view = memoryview(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -address % HUGE_PAGE_BYTES
    return view[start : start + bytes]
