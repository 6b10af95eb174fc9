"""Mappings of files in memory: shared, writable, and left out of a forked child, so that the child cannot change
them."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref

logger = logging.getLogger("tierfall")

# MADV_POPULATE_WRITE of Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23
# Linux on x86, Arm, RISC-V and POWER; the mmap module does not name it.
_MAP_FIXED = 0x10

_mappings: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The writable mappings of this process, with their addresses."""


def fork_safe_mapping(fd: int, length_bytes: int) -> mmap.mmap:
    """Map a file, shared and writable, in this process only.

    The kernel leaves the range out of a forked child. A child of ``os.fork`` gets read-only zeros at the same
    addresses.
    """
    mapping = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED)
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings[mapping] = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return mapping


def _cover(address: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    target = (ctypes.c_void_p(address), ctypes.c_size_t(length))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(*target, mmap.PROT_READ, flags, -1, ctypes.c_long(0)) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {length} bytes: {os.strerror(number)}")


def _cover_in_child() -> None:
    """Map read-only zeros over the ranges of the parent's mappings. Left free, a range could be used by another mapping
    of the child, which the deallocation of the inherited mapping object would then unmap. Read-only memory does not
    count as committed."""
    for mapping, address in list(_mappings.items()):
        try:
            _cover(address, len(mapping))
        except OSError as error:
            logger.debug("fork: the range of a mapping was not covered: %s", error)


os.register_at_fork(after_in_child=_cover_in_child)


def address_of(mapping: mmap.mmap) -> int:
    """The address of a mapping that ``fork_safe_mapping`` has made."""
    return _mappings[mapping]


def populate(mapping: mmap.mmap, start: int, end: int) -> None:
    """Allocate every page of the range and enter it in the page table: a first touch costs ten times the copy. Other
    threads of Python run meanwhile, since Linux 5.14."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(_mappings[mapping] + start), ctypes.c_size_t(end - start)
    if libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"touching {end - start} bytes: {os.strerror(number)}")
    # A kernel before 5.14: read one byte of each page.
    memoryview(mapping)[start : end : mmap.PAGESIZE].tobytes()
