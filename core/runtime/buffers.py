"""Page-aligned buffers that are taken once and used again: what reads from storage go through.

Anonymous mappings, so that direct I/O takes them as they are; nothing large is allocated or freed in steady state.
A device may go on reading a buffer after it was given back: it is lent again only once that is over. A read that never
returns may go on filling one: that is not lent again at all, and another takes its place.
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
# Linux 4.14; the mmap module does not name it.
_MADV_WIPEONFORK = 18


_filled: set[int] = set()
"""The memory that reads are under way into, by the identity of the object that owns it: each read holds that object."""


def begin_filling(view: memoryview) -> None:
    """Note that a read into this memory begins, which its caller may leave behind."""
    _filled.add(id(view.obj))


def end_filling(view: memoryview) -> None:
    """Note that the read into this memory has returned."""
    _filled.discard(id(view.obj))


def is_being_filled(view: memoryview) -> bool:
    """Say whether a read that was left behind may write to this memory."""
    return id(view.obj) in _filled


class Buffer:
    """A buffer that is lent: ``view`` is its memory. Whoever lets a device read it adds the mark of the end to
    ``marks``."""

    def __init__(self, bytes: int) -> None:
        self.view = allocate(bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.marks: list[StreamEvent] = []
        self.lock: PageLock | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing has to be waited for; what a device reports is ``settle``'s to raise."""
        try:
            return all(mark.is_done() for mark in self.marks)
        except RuntimeError:
            return True

    def holds(self, address: int) -> bool:
        """Say whether an address lies in this buffer."""
        return self.address <= address < self.address + len(self.view)

    def settle(self) -> None:
        """Wait until no device reads this any more; raises what it reports, and does not wait for that again."""
        marks, self.marks = self.marks, []
        with ExitStack() as all_of_them:
            for mark in marks:
                all_of_them.callback(mark.wait)

    def free(self) -> None:
        """Unlock the memory, which may then go, once no device reads it."""
        try:
            self.settle()
        except RuntimeError as error:
            logger.warning("a copy from a buffer had failed: %s", error)
        if self.lock is not None:
            self.lock.release()


class BufferPool:
    """Buffers of one size, at most ``count`` of them, allocated when first needed."""

    def __init__(self, *, bytes: int, count: int) -> None:
        self.bytes = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._left = count
        self._free: deque[Buffer] = deque()
        self._lost: list[Buffer] = []
        """Buffers that reads were left behind in: their memory stays until those have returned."""
        self._changed = threading.Condition()
        self._refused = False

    @contextmanager
    def take(self, bytes: int) -> Iterator[memoryview]:
        """Lend the memory of a buffer, as ``lend`` does, to whoever gives no device anything to read from it."""
        with self.lend(bytes) as buffer:
            yield buffer.view

    @contextmanager
    def lend(self, bytes: int) -> Iterator[Buffer]:
        """Lend a buffer, as ``borrow`` does, until the ``with`` is left."""
        buffer = self.borrow(bytes)
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def borrow(self, bytes: int) -> Buffer:
        """Return a buffer of at least ``bytes`` bytes that no device reads, waiting for one if all are out.

        What is larger than the pool's buffers is allocated for this once. Raises what a device reports of copies from
        the buffer that were still under way.
        """
        return Buffer(bytes) if bytes > self.bytes else self._take()

    def give_back(self, buffer: Buffer) -> None:
        """Take back what was borrowed, or in its place another one of the same length. The marks of one that was
        allocated for this once are waited for. One that is still being filled is replaced."""
        if len(buffer.view) > self.bytes:
            buffer.settle()
            return
        with self._changed:
            if is_being_filled(buffer.view):
                self._lost.append(buffer)
                self._left += 1
            else:
                self._free.append(buffer)
            self._changed.notify()

    def lock_pages(self, buffer: Buffer, on: torch.device) -> None:
        """Page-lock a buffer that is lent, for good, so that devices read it at full speed, beside everything else.

        A refusal is said once: the buffers serve without. What was allocated for once is left as it is.
        """
        if buffer.lock is not None or self._refused or len(buffer.view) > self.bytes:
            return
        lock = pinned.lock_pages(buffer.address, len(buffer.view), on)
        if lock.locked:
            buffer.lock = lock
            return
        with self._changed:
            said, self._refused = self._refused, True
        if not said:
            logger.warning(
                "buffers of %d bytes could not be page-locked: %s; copies to the GPU go on, slower; raise `ulimit -l` "
                "(or --ulimit memlock=-1 of a container)",
                self.bytes,
                lock.reason,
            )

    def release(self) -> None:
        """Unlock every buffer and let its memory go, once no device reads it; whoever takes one later gets a fresh one.

        Nobody has one out.
        """
        with self._changed:
            freed, self._free = list(self._free), deque()
            self._left += len(freed)
            freed += [buffer for buffer in self._lost if not is_being_filled(buffer.view)]
            self._lost = [buffer for buffer in self._lost if is_being_filled(buffer.view)]
        for buffer in freed:
            buffer.free()

    def _take(self) -> Buffer:
        buffer = self._next()
        if buffer is None:
            return self._allocate()
        try:
            buffer.settle()
        except BaseException:
            self.give_back(buffer)
            raise
        return buffer

    def _next(self) -> Buffer | None:
        """Return the buffer that came back first, which a device may still read; None where a fresh one is due."""
        with self._changed:
            while True:
                if self._free and (self._left == 0 or self._free[0].is_settled):
                    return self._free.popleft()
                if self._left:
                    self._left -= 1
                    return None
                self._changed.wait()

    def _allocate(self) -> Buffer:
        try:
            return Buffer(self.bytes)
        except BaseException:
            with self._changed:
                self._left += 1
                self._changed.notify()
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
