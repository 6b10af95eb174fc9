"""The probe, at open, of what the file system under a root supports.

Direct I/O is probed by writing one aligned block and reading it back, since a file system may accept the flag and
reject the write. Conditional create is probed by a hard link, or by a rename that does not replace its target. A root
that is not writable raises here.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tierfall.backends.posix import system
from tierfall.backends.posix.system import translated
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.backends.toolkit.views import aligned_block
from tierfall.core.types.errors import StorageFullError

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
    reported = system.direct_alignment(file)
    return max(reported, mmap.PAGESIZE) if reported else 0


def probe(folder: int, place: str, *, direct_io: bool) -> Medium:
    """Probe what the folder's file system supports; direct I/O only with ``direct_io``. A full disk is no error: its
    objects can still be read and deleted, without direct I/O."""
    try:
        with translated(f"open {place} for writing"), _probe_file(folder) as (name, descriptor):
            return Medium(
                direct_bytes=_direct_bytes(folder, name, descriptor) if direct_io else 0,
                exclusive=_exclusive(folder, name),
                cache_never_waits=system.never_waits(descriptor),
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
    reported = system.direct_alignment(descriptor)
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
        if not system.rename_if_absent(folder, name, other):
            return Exclusive.NONE
        found = Exclusive.RENAME
    with suppress(FileNotFoundError):
        os.unlink(other, dir_fd=folder)
    return found
