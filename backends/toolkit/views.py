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

from tierfall.core.types.errors import BackendError


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the stable C interface (PEP 688's background, "Buffer Protocol" in the C API manual)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view, read-only or not; valid as long as the view exists."""
    raw = _PyBuffer()
    _get_buffer(view, ctypes.byref(raw), 0)
    try:
        return int(raw.buf or 0)
    finally:
        _release_buffer(ctypes.byref(raw))


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
