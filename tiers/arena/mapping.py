"""Moving the mappings of an arena's file to a new file, after the old one was removed.

A removed file cannot get a name again. So its bytes are moved to a new file, range by range: each range is copied, the
new file's pages are mapped at the addresses of the old ones, and those are freed, so that little more memory is used.
Views of the memory stay valid, and see the same bytes. No byte of a range may be written while the range is moved.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tierfall.backends.toolkit.mapping import remap
from tierfall.core.types.errors import CapacityError, ConfigError
from tierfall.core.types.values import ByteRange
from tierfall.tiers.arena.folder import MORE_ROOM, sized

logger = logging.getLogger("tierfall")

_MOVE_BYTES = 4 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux.
_PUNCH_HOLE = 0x01 | 0x02


class ArenaRenewal:
    """The new file, under a temporary name until ``publish``, and the ranges that have not moved there yet."""

    def __init__(self, partial: Path, total_bytes: int, *, what: str) -> None:
        self._partial = partial
        self._what = what
        self._left = [ByteRange(start=0, end=total_bytes)]
        partial.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(partial, flags, 0o600)
        os.ftruncate(self.fd, total_bytes)

    @property
    def done(self) -> bool:
        """Whether every range has moved."""
        return not self._left

    def move(
        self,
        old_fd: int,
        view: memoryview,
        mappings: Sequence[mmap.mmap],
        busy: Sequence[ByteRange],
    ) -> bool:
        """Move a few MiB outside of ``busy``, the ranges that are being written; False where none are left. ``view``
        covers the whole memory."""
        free = next(iter(_without(self._left, busy)), None)
        if free is None:
            return False
        moved = ByteRange(start=free.start, end=min(free.end, free.start + _MOVE_BYTES))
        reserve(
            self.fd,
            moved,
            f"{self._what}: making its file anew: there is no room for {sized(moved.length)} more; {MORE_ROOM}",
        )
        _write_all(self.fd, view[moved.start : moved.end], moved.start)
        for mapping in mappings:
            if moved.start < len(mapping):
                remap(mapping, self.fd, moved.start, min(moved.end, len(mapping)))
        self._left = _without(self._left, [moved])
        _free_pages(old_fd, moved)
        return True

    def publish(self, path: Path) -> None:
        """Link the new file to its name. Raises ConfigError where another file has that name by now."""
        try:
            os.link(self._partial, path)
        except FileExistsError as error:
            raise ConfigError(
                f"{self._what}: its file was removed, and another one has its name by now; it is left as it is"
            ) from error
        finally:
            self._partial.unlink(missing_ok=True)

    def discard(self) -> None:
        os.close(self.fd)
        self._partial.unlink(missing_ok=True)


def reserve(fd: int, span: ByteRange, message: str) -> None:
    """Reserve the pages of a range of a file; raises CapacityError with ``message`` where memory is missing."""
    try:
        os.posix_fallocate(fd, span.start, span.length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise CapacityError(message) from error


def _without(ranges: Iterable[ByteRange], taken: Iterable[ByteRange]) -> list[ByteRange]:
    """Subtract the ranges ``taken`` from ``ranges``."""
    left = list(ranges)
    for out in taken:
        parts = ((r, max(r.start, out.start), min(r.end, out.end)) for r in left)
        left = [
            ByteRange(start=start, end=end)
            for r, low, high in parts
            for start, end in (
                ((r.start, low), (high, r.end)) if low < high else ((r.start, r.end),)
            )
            if start < end
        ]
    return left


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _free_pages(fd: int, span: ByteRange) -> None:
    """Free the pages of a range of the old file, which stays open and mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    start, length = ctypes.c_long(span.start), ctypes.c_long(span.length)
    if libc.fallocate(fd, _PUNCH_HOLE, start, length) != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.debug(
            "arena: %d bytes of the old file are kept until it is closed: %s", span.length, reason
        )
