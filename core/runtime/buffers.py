"""Pools of page-aligned buffers for reads from storage.

Buffers are anonymous mappings, which direct I/O accepts; they are reused, so that nothing large is allocated or freed
in steady state. A device may still read a buffer after its return: it is lent again only after those copies. An
abandoned read may still fill a buffer: that one is never lent again, and a new one replaces it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tierfall.core.runtime import pinned
from tierfall.core.runtime.pinned import PageLock

if TYPE_CHECKING:
    import torch

    from tierfall.core.runtime.streams import StreamEvent

logger = logging.getLogger("tierfall")

HUGE_PAGE_BYTES = 2 << 20
_MADV_WIPEONFORK = 18  # Linux 4.14; the mmap module has no name for it

_filled: set[int] = set()
"""Memory with reads in progress, by the id of the owning object, which each read references."""


def begin_filling(view: memoryview) -> None:
    """Record the start of a read into this memory that its caller may abandon."""
    _filled.add(id(view.obj))


def end_filling(view: memoryview) -> None:
    """Record that the read into this memory has returned."""
    _filled.discard(id(view.obj))


def is_being_filled(view: memoryview) -> bool:
    """Whether an abandoned read may still write to this memory."""
    return id(view.obj) in _filled


class Buffer:
    """A buffer; ``view`` is its memory. Code that lets a device read it appends the event of that copy's end to
    ``events``."""

    def __init__(self, bytes: int) -> None:
        self.view = allocate(bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.events: list[StreamEvent] = []
        self.lock: PageLock | None = None

    @property
    def is_settled(self) -> bool:
        """Whether ``wait_for_devices`` would return at once; it raises a device's error, which counts as settled."""
        try:
            return all(mark.is_done() for mark in self.events)
        except RuntimeError:
            return True

    def contains(self, address: int) -> bool:
        """Whether an address is in this buffer."""
        return self.address <= address < self.address + len(self.view)

    def wait_for_devices(self) -> None:
        """Wait until no device reads this buffer; raises a device's error, once."""
        marks, self.events = self.events, []
        with ExitStack() as all_of_them:
            for mark in marks:
                all_of_them.callback(mark.wait)

    def free(self) -> None:
        """Wait until no device reads the memory, and unlock it."""
        try:
            self.wait_for_devices()
        except RuntimeError as error:
            logger.warning("a copy from a buffer failed: %s", error)
        if self.lock is not None:
            self.lock.release()


class BufferPool:
    """At most ``count`` buffers of one size, allocated on demand."""

    def __init__(self, *, bytes: int, count: int) -> None:
        self.bytes = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._unallocated = count
        self._free: deque[Buffer] = deque()
        self._abandoned: list[Buffer] = []
        """Buffers with abandoned reads: their memory is kept until these have returned."""
        self._changed = threading.Condition()
        self._refused = False

    @contextmanager
    def lend_view(self, bytes: int) -> Iterator[memoryview]:
        """Lend the memory of a buffer that no device will read."""
        with self.lend(bytes) as buffer:
            yield buffer.view

    @contextmanager
    def lend(self, bytes: int) -> Iterator[Buffer]:
        """Lend a buffer, as ``borrow`` does, for the ``with`` block."""
        buffer = self.borrow(bytes)
        try:
            yield buffer
        finally:
            self.return_buffer(buffer)

    def borrow(self, bytes: int) -> Buffer:
        """Return a buffer of at least ``bytes`` bytes that no device reads; waits while all are lent.

        A request above the pool's size gets a buffer of its own. Raises a device's error of an earlier copy from the
        buffer.
        """
        return Buffer(bytes) if bytes > self.bytes else self._take()

    def return_buffer(self, buffer: Buffer) -> None:
        """Return a borrowed buffer, or another of the same length in its place. Waits for copies from a buffer above
        the pool's size. A buffer that is still being filled is replaced."""
        if len(buffer.view) > self.bytes:
            buffer.wait_for_devices()
            return
        with self._changed:
            if is_being_filled(buffer.view):
                self._abandoned.append(buffer)
                self._unallocated += 1
            else:
                self._free.append(buffer)
            self._changed.notify()

    def lock_pages(self, buffer: Buffer, on: torch.device) -> None:
        """Page-lock a lent buffer permanently, so that copies to devices are asynchronous and run at full speed.

        A refusal is logged once; the buffers work without. Buffers above the pool's size are not locked.
        """
        if buffer.lock is not None or self._refused or len(buffer.view) > self.bytes:
            return
        lock = pinned.lock_pages(buffer.address, len(buffer.view), on)
        if lock.locked:
            buffer.lock = lock
            return
        with self._changed:
            is_logged, self._refused = self._refused, True
        if not is_logged:
            logger.warning(
                "buffers of %d bytes could not be page-locked: %s; copies to the GPU continue, slower; raise "
                "`ulimit -l` (or --ulimit memlock=-1 of a container)",
                self.bytes,
                lock.reason,
            )

    def release(self) -> None:
        """Free every buffer, after waiting for devices; later borrowers get new ones. No buffer may be lent."""
        with self._changed:
            freed, self._free = list(self._free), deque()
            self._unallocated += len(freed)
            freed += [buffer for buffer in self._abandoned if not is_being_filled(buffer.view)]
            self._abandoned = [buffer for buffer in self._abandoned if is_being_filled(buffer.view)]
        for buffer in freed:
            buffer.free()

    def _take(self) -> Buffer:
        buffer = self._next_free()
        if buffer is None:
            return self._allocate()
        try:
            buffer.wait_for_devices()
        except BaseException:
            self.return_buffer(buffer)
            raise
        return buffer

    def _next_free(self) -> Buffer | None:
        """The buffer that was returned first, which a device may still read; None if a new one is to be allocated."""
        with self._changed:
            while True:
                if self._free and (self._unallocated == 0 or self._free[0].is_settled):
                    return self._free.popleft()
                if self._unallocated:
                    self._unallocated -= 1
                    return None
                self._changed.wait()

    def _allocate(self) -> Buffer:
        try:
            return Buffer(self.bytes)
        except BaseException:
            with self._changed:
                self._unallocated += 1
                self._changed.notify()
            raise


def allocate(bytes: int) -> memoryview:
    """Map anonymous memory, on huge pages where available, since direct I/O pins every page that it fills.

    The mapping is private, since the kernel gives shared mappings no huge pages by default. A forked child reads zeros
    there: were its pages shared, a direct read in progress could write to the wrong process's (open(2), O_DIRECT).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, bytes + HUGE_PAGE_BYTES, flags=flags)
    mapping.madvise(_MADV_WIPEONFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # no huge pages: the same memory in small pages
        return memoryview(mapping)[:bytes]
    view = memoryview(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -address % HUGE_PAGE_BYTES
    return view[start : start + bytes]
