"""Whole reads and writes on a file descriptor: looped until done, direct where the bytes lie right.

Direct and buffered I/O never touch the same page of a file that is being written: only whole aligned blocks go
directly, whatever is left over at either end goes through the page cache, and the fsync at the end covers both. It
knows offsets and memory, no keys; what it raises is OSError.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

from tierfall.backends.posix import linux
from tierfall.backends.toolkit.views import BouncePool, address_of, copy_bytes

DIRECT_BYTES_MIN = 256 * 1024
BOUNCE_BYTES = 2 * 1024 * 1024
SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the aligned middle of a range begins and ends, counted from the start of the view."""

    start: int
    end: int


def split(offset: int, size_bytes: int, block_bytes: int) -> Split | None:
    """Find the whole blocks in a range; None where there are too few to be worth direct I/O."""
    if not block_bytes or size_bytes < DIRECT_BYTES_MIN:
        return None
    start = -offset % block_bytes
    end = size_bytes - (offset + size_bytes) % block_bytes
    return Split(start=start, end=end) if end - start >= block_bytes else None


def write_whole(descriptor: int, view: memoryview, offset: int, *, block_bytes: int = 1) -> None:
    """Write a flat view at an offset; after a short write that ended inside a block, the block is written again."""
    done = 0
    while done < view.nbytes:
        count = os.pwrite(descriptor, view[done:], offset + done)
        done += _whole_blocks(count, view.nbytes - done, block_bytes, "write")


def write_bounced(
    descriptor: int, view: memoryview, offset: int, *, block_bytes: int, pool: BouncePool
) -> None:
    """Write whole blocks whose memory is not aligned, by way of a block that is."""
    with pool.block() as block:
        for start in range(0, view.nbytes, block.nbytes):
            piece = view[start : start + block.nbytes]
            copy_bytes(block[: piece.nbytes], piece)
            write_whole(descriptor, block[: piece.nbytes], offset + start, block_bytes=block_bytes)


def read_whole(descriptor: int, view: memoryview, offset: int, *, block_bytes: int) -> int:
    """Fill a flat view from an offset; return how many bytes there were before the end of the file.

    The descriptor must be the caller's own: its direct flag is switched on for the aligned middle.
    """
    middle = split(offset, view.nbytes, block_bytes)
    if middle is None or (address_of(view) + middle.start) % block_bytes:
        return _read(descriptor, view, offset)
    count = _read(descriptor, view[: middle.start], offset)
    if count < middle.start:
        return count
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    count += _read_direct(
        descriptor, view[middle.start : middle.end], offset + middle.start, block_bytes
    )
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return count + _read(descriptor, view[count:], offset + count)


def is_cached(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Say whether a range of a file of this user's own is in the page cache, as far as a few of its pages tell.

    The range is mapped to be asked about, and never touched: a file that is cut short, or a disk that fails, would end
    the process at the touch (docs/decisions/0012). Of other users' files the kernel does not say.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + size_bytes - start
    try:
        mapping = mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # not to be mapped, or shorter than the range
        return False
    with mapping, memoryview(mapping) as view:
        address = address_of(view)
        pages = -(-length // mmap.PAGESIZE)
        wanted = {page * (pages - 1) // (SAMPLES - 1) for page in range(SAMPLES)}
        return all(linux.is_resident(address + page * mmap.PAGESIZE) for page in sorted(wanted))


def _read(descriptor: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _read_direct(descriptor: int, view: memoryview, offset: int, block_bytes: int) -> int:
    """Read whole blocks; a short read ends it, and the caller goes on without the direct flag."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        done += count
        if count == 0 or count % block_bytes:
            break
    return done


def _whole_blocks(count: int, wanted: int, block_bytes: int, operation: str) -> int:
    taken = count if count == wanted else count - count % block_bytes
    if taken <= 0:
        raise OSError(errno.EIO, f"a {operation} of {wanted} bytes took {count}")
    return taken
