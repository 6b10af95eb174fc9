"""Memory for backends: flat views, their addresses, aligned blocks, copies without the interpreter lock.

``view[:] = other`` and ``bytes(view)`` hold the interpreter lock while they copy. ``memmove`` through ctypes releases
it, so that a large copy does not stop the training thread. This module knows no files or keys.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tierfall.core.types.errors import BackendError


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view, read-only or not; valid as long as the view exists."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def flat(view: memoryview, *, writable: bool = False) -> memoryview:
    """Cast a view to bytes; raises BackendError where it is not contiguous, or read-only where ``writable``."""
    if not view.c_contiguous:
        raise BackendError("the view is not contiguous; pass contiguous memory")
    if writable and view.readonly:
        raise BackendError("the view to read into is read-only; pass writable memory")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy a flat view into another of the same size, without the interpreter lock."""
    if target.nbytes != source.nbytes or target.readonly:
        raise ValueError(f"cannot copy {source.nbytes} bytes into a view of {target.nbytes}")
    if source.nbytes:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def aligned_block(size_bytes: int, alignment_bytes: int) -> memoryview:
    """Allocate zeroed memory at an address that is a multiple of ``alignment_bytes``."""
    spare = alignment_bytes if alignment_bytes > mmap.PAGESIZE else 0
    whole = memoryview(mmap.mmap(-1, max(size_bytes, 1) + spare))
    start = -address_of(whole) % alignment_bytes
    return whole[start : start + size_bytes]


class BouncePool:
    """Aligned blocks, for direct I/O of bytes whose own memory is not aligned.

    Blocks are allocated when first needed; at most ``keep`` of them are kept for the next use.
    """

    def __init__(self, *, block_bytes: int, alignment_bytes: int, keep: int) -> None:
        self._block_bytes = block_bytes
        self._alignment_bytes = alignment_bytes
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    @contextmanager
    def block(self) -> Iterator[memoryview]:
        with self._lock:
            taken = self._free.pop() if self._free else None
        if taken is None:
            taken = aligned_block(self._block_bytes, self._alignment_bytes)
        try:
            yield taken
        finally:
            with self._lock:
                if len(self._free) < self._keep:
                    self._free.append(taken)
