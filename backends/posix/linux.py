"""The few Linux calls that Python's ``os`` lacks: statx for direct I/O alignment, fallocate, renameat2, mincore.

Each says when the kernel, the C library or the file system does not know it; none decides what that means.
``os.posix_fallocate`` is not used: where a file system cannot reserve, the C library emulates it by touching every
block, which on a parallel file system costs as much as writing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_OFFSET = 152
_RENAME_NOREPLACE = 1


def direct_alignment(fd: int) -> int | None:
    """Return the alignment in bytes that direct I/O on this file needs; 0: refused; None: the kernel does not say."""
    call = getattr(_LIBC, "statx", None)
    if call is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if call(ctypes.c_int(fd), b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), answer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", answer, _STATX_DIO_OFFSET)
    return max(memory, offset) if memory and offset else 0


def fallocate(fd: int, length: int) -> bool:
    """Reserve space for ``length`` bytes, setting the size; False where the file system cannot.

    Raises OSError where it can and there is none.
    """
    call = getattr(_LIBC, "fallocate", None)
    if call is None:
        return False
    while call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def is_resident(address: int) -> bool:
    """Say whether the page mapped at ``address``, the start of a page, is in memory; False where the kernel does not
    say. Nothing is read, and the page is not touched."""
    call = getattr(_LIBC, "mincore", None)
    answer = ctypes.c_ubyte()
    if call is None or call(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(answer)):
        return False
    return bool(answer.value & 1)


def rename_if_absent(folder: int, source: str, target: str) -> bool:
    """Rename within a folder unless the target is there (then FileExistsError); False where this is not known."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return False
    where = ctypes.c_int(folder)
    names = os.fsencode(source), os.fsencode(target)
    if call(where, names[0], where, names[1], ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))
