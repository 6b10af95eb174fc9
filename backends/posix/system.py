"""System calls for this backend: complete reads and writes on a descriptor, Linux calls that Python's ``os`` lacks, the
classification of an errno as an error, and the probe of what a file system supports. This module knows offsets and
memory, no keys.

Direct and buffered I/O never write the same page of a file: whole aligned blocks are written directly, the rest at
either end through the page cache, and one fsync covers both. ``os.posix_fallocate`` is not used: where a file system
cannot reserve space, the C library emulates it by touching every block, which on a parallel file system costs as much
as writing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.backends.toolkit.views import BouncePool, address_of, aligned_block, copy_bytes
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyInvalidError,
    LostWriteError,
    StorageFullError,
    UnreachableError,
)

DIRECT_BYTES_MIN = 256 * 1024
BOUNCE_BYTES = 2 * 1024 * 1024
SAMPLES = 8


def split(offset: int, size_bytes: int, block_bytes: int) -> slice | None:
    """Return the whole blocks of a range of a view; None where they are too few for direct I/O."""
    if not block_bytes or size_bytes < DIRECT_BYTES_MIN:
        return None
    start = -offset % block_bytes
    end = size_bytes - (offset + size_bytes) % block_bytes
    return slice(start, end) if end - start >= block_bytes else None


def write_whole(descriptor: int, view: memoryview, offset: int, *, block_bytes: int = 1) -> None:
    """Write all of a flat view at an offset. After a short write that ends inside a block, that block is repeated."""
    done = 0
    while done < view.nbytes:
        count = os.pwrite(descriptor, view[done:], offset + done)
        done += _whole_blocks(count, view.nbytes - done, block_bytes)


def write_bounced(
    descriptor: int, view: memoryview, offset: int, *, block_bytes: int, pool: BouncePool
) -> None:
    """Write whole blocks from unaligned memory, through an aligned buffer."""
    with pool.block() as block:
        for start in range(0, view.nbytes, block.nbytes):
            piece = view[start : start + block.nbytes]
            copy_bytes(block[: piece.nbytes], piece)
            write_whole(descriptor, block[: piece.nbytes], offset + start, block_bytes=block_bytes)


def read_whole(descriptor: int, view: memoryview, offset: int, *, block_bytes: int) -> int:
    """Fill a flat view from an offset; return the number of bytes before the end of the file.

    The descriptor must not be shared: its O_DIRECT flag is set for the aligned middle.
    """
    middle = split(offset, view.nbytes, block_bytes)
    if middle is None or (address_of(view) + middle.start) % block_bytes:
        return _read(descriptor, view, offset)
    count = _read(descriptor, view[: middle.start], offset)
    if count < middle.start:
        return count
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    count += _read_direct(descriptor, view[middle], offset + middle.start, block_bytes)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return count + _read(descriptor, view[count:], offset + count)


def read_without_waiting(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill a flat view from the page cache, as ``read_whole`` does. Raises BlockingIOError where a page is not there,
    and another OSError where the file system, or the kernel, cannot read so."""
    return _read(descriptor, view, offset, os.RWF_NOWAIT)


def never_waits(descriptor: int) -> bool:
    """Whether ``read_without_waiting`` works on an open file."""
    try:
        read_without_waiting(descriptor, memoryview(bytearray(1)), 0)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def is_cached(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Whether a range of a file of this user is in the page cache, by a sample of its pages.

    The range is mapped for the question and never accessed: if the file is truncated or the disk fails, an access would
    kill the process (docs/decisions/0012). The kernel does not report this for files of other users.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + size_bytes - start
    try:
        mapping = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # mapping is not supported, or the file is shorter than the range
        return False
    with mapping, memoryview(mapping) as view:
        address = address_of(view)
        pages = -(-length // mmap.PAGESIZE)
        sample = {page * (pages - 1) // (SAMPLES - 1) for page in range(SAMPLES)}
        return all(is_resident(address + page * mmap.PAGESIZE) for page in sorted(sample))


def _read(descriptor: int, view: memoryview, offset: int, flags: int = 0) -> int:
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done, flags)
        if count == 0:
            break
        done += count
    return done


def _read_direct(descriptor: int, view: memoryview, offset: int, block_bytes: int) -> int:
    """Read whole blocks until a short read; the caller continues without O_DIRECT."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        done += count
        if count == 0 or count % block_bytes:
            break
    return done


def _whole_blocks(count: int, size_bytes: int, block_bytes: int) -> int:
    """Return the bytes of a write that need not be repeated. Raises OSError without any, instead of looping."""
    whole = count if count == size_bytes else count - count % block_bytes
    if whole <= 0:
        raise OSError(errno.EIO, f"a write of {size_bytes} bytes wrote {count}")
    return whole


# Linux calls, which the kernel or the file system may not support ----------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_OFFSET = 152
_RENAME_NOREPLACE = 1


def direct_alignment(fd: int) -> int | None:
    """Return the alignment in bytes for direct I/O on this file; 0: not supported; None: the kernel does not report
    it."""
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    mask = ctypes.c_uint(_STATX_DIOALIGN)
    if _LIBC.statx(ctypes.c_int(fd), b"", _AT_EMPTY_PATH, mask, answer) != 0:
        return None
    (reported,) = struct.unpack_from("=I", answer, 0)
    if not reported & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", answer, _STATX_DIO_OFFSET)
    return max(memory, offset) if memory and offset else 0


def fallocate(fd: int, length: int) -> bool:
    """Reserve space for ``length`` bytes, and set the file's size; False where the file system does not support it.

    Raises OSError where the space is missing.
    """
    words = ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(length)
    while _LIBC.fallocate(*words) != 0:
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def is_resident(address: int) -> bool:
    """Whether the page mapped at ``address``, the start of a page, is in memory; False where the kernel does not report
    it. The page is not accessed."""
    answer = ctypes.c_ubyte()
    failed = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(answer))
    return not failed and bool(answer.value & 1)


def rename_if_absent(folder: int, source: str, target: str) -> bool:
    """Rename within a folder; raises FileExistsError where the target exists. False where this is not supported."""
    fd, flags = ctypes.c_int(folder), ctypes.c_uint(_RENAME_NOREPLACE)
    if _LIBC.renameat2(fd, os.fsencode(source), fd, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


# Errors -------------------------------------------------------------------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_PASS = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENODATA,  # a sector that cannot be read; GlusterFS: another node has just taken the name
    errno.ETIMEDOUT,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOMEDIUM,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)

# A retryable error means that nothing is known. ENOENT is missing: only the caller knows whether the folder is still
# the tier's.
_TABLE: dict[int, tuple[type[BackendError], str]] = {
    errno.EEXIST: (KeyExistsError, "the key is taken"),
    errno.ENAMETOOLONG: (KeyInvalidError, "this file system supports no name of that length"),
    errno.ELOOP: (AccessDeniedError, "symbolic links are not followed below the tier's folder"),
    **dict.fromkeys(_FULL, (StorageFullError, "free space there, or raise the quota")),
    **dict.fromkeys(_DENIED, (AccessDeniedError, "check owner, mode and mount options")),
    **dict.fromkeys(
        _MAY_PASS, (UnreachableError, "nothing is known about what is stored; try again")
    ),
}


def backend_error(error: OSError, what: str) -> BackendError:
    """Classify an OSError; ``what`` is the operation, key and place."""
    kind, hint = _TABLE.get(
        error.errno or 0, (BackendError, "check the tier's folder and its file system")
    )
    return kind(f"{what}: {error.strerror or error}; {hint}")


def sync_error(error: OSError, what: str, state: str) -> BackendError:
    """Make the error of a failed fsync or close; ``state`` is the state of the object then.

    Never retryable: the kernel may have dropped the bytes, and a second fsync would report success.
    """
    kind = StorageFullError if error.errno in _FULL else LostWriteError
    return kind(f"{what}: {error.strerror or error}; {state}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise the OSErrors of the block as BackendErrors; a BackendError passes unchanged."""
    try:
        yield
    except BackendError:
        raise
    except OSError as error:
        raise backend_error(error, what) from error


# The probe at open --------------------------------------------------------------------------------
#
# Direct I/O is probed by writing one aligned block and reading it back, since a file system may accept the flag and
# reject the write. Conditional create is probed by a hard link, or by a rename that does not replace its target. A root
# that is not writable raises here.

_USUAL_ALIGNMENT_BYTES = 4096
_REFUSALS = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EFAULT, errno.ENOTTY}
)
_NO_LINKS = frozenset({*_REFUSALS, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV})


class Exclusive(StrEnum):
    """The call that publishes an object only if its key is free."""

    LINK = "link"
    RENAME = "rename"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What the file system of a root supports; ``direct_bytes`` is the block length of direct I/O, 0 without it;
    ``cache_never_waits``: see ``Traits``."""

    direct_bytes: int
    exclusive: Exclusive
    cache_never_waits: bool = False


UNPROBED = Medium(direct_bytes=0, exclusive=Exclusive.LINK)


def direct_block(file: int) -> int:
    """Return the block length that the kernel reports for direct I/O on an open file; 0 without direct I/O."""
    reported = direct_alignment(file)
    return max(reported, mmap.PAGESIZE) if reported else 0


def probe(folder: int, place: str, *, direct_io: bool) -> Medium:
    """Probe what the folder's file system supports; direct I/O only with ``direct_io``. A full disk is no error: its
    objects can still be read and deleted, without direct I/O."""
    try:
        with translated(f"open {place} for writing"), _probe_file(folder) as (name, descriptor):
            return Medium(
                direct_bytes=_direct_bytes(folder, name, descriptor) if direct_io else 0,
                exclusive=_exclusive(folder, name),
                cache_never_waits=never_waits(descriptor),
            )
    except StorageFullError:
        return UNPROBED


@contextmanager
def _probe_file(folder: int) -> Iterator[tuple[str, int]]:
    name = unfinished_name()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield name, descriptor
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _direct_bytes(folder: int, name: str, descriptor: int) -> int:
    reported = direct_alignment(descriptor)
    if reported == 0:
        return 0
    # At least a page: partial blocks are written through the page cache, and the write-back of a page that is written
    # both ways could overwrite what direct I/O wrote.
    block_bytes = max(reported or _USUAL_ALIGNMENT_BYTES, mmap.PAGESIZE)
    try:
        return block_bytes if _direct_works(folder, name, block_bytes) else 0
    except OSError as error:
        if error.errno in (*_REFUSALS, errno.ENOSPC, errno.EDQUOT):
            return 0
        raise


def _direct_works(folder: int, name: str, block_bytes: int) -> bool:
    written, found = (
        aligned_block(block_bytes, block_bytes),
        aligned_block(block_bytes, block_bytes),
    )
    written[:] = bytes(index % 251 for index in range(block_bytes))
    descriptor = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if os.pwrite(descriptor, written, 0) != block_bytes:
            return False
        return os.preadv(descriptor, [found], 0) == block_bytes and found == written
    finally:
        os.close(descriptor)


def _exclusive(folder: int, name: str) -> Exclusive:
    other, found = unfinished_name(), Exclusive.LINK
    try:
        os.link(name, other, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not rename_if_absent(folder, name, other):
            return Exclusive.NONE
        found = Exclusive.RENAME
    with suppress(FileNotFoundError):
        os.unlink(other, dir_fd=folder)
    return found
