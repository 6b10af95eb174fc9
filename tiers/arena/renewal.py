"""An arena's file made anew under memory that is in use, after somebody has removed it.

A file without a name cannot be named again. So its bytes go to a new file, range by range: they are copied, the new
file's pages are mapped at the addresses of the old ones, and those are given back: it takes little more memory than
there was. Whatever holds a view of the memory keeps it, and sees the same bytes.

A range must not be written to while it is moved: whoever calls says which are.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tierfall.core.types.errors import CapacityError, ConfigError
from tierfall.core.types.values import ByteRange
from tierfall.tiers.arena.folder import MORE_ROOM, sized
from tierfall.tiers.arena.mapping import remap

logger = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux.
_PUNCH_HOLE = 0x01 | 0x02


class ArenaRenewal:
    """The new file, under another name until ``publish``, and what has still to move there."""

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
        """Whether all has moved."""
        return not self._left

    def move(
        self,
        old_fd: int,
        view: memoryview,
        mappings: Sequence[mmap.mmap],
        busy: Sequence[ByteRange],
    ) -> bool:
        """Move a few MiB that are not ``busy``; False where there are none. ``view`` is of the whole memory."""
        free = next(iter(_without(self._left, busy)), None)
        if free is None:
            return False
        step = ByteRange(start=free.start, end=min(free.end, free.start + _STEP_BYTES))
        self._reserve(step)
        _write_all(self.fd, view[step.start : step.end], step.start)
        for mapping in mappings:
            if step.start < len(mapping):
                remap(mapping, self.fd, step.start, min(step.end, len(mapping)))
        self._left = _without(self._left, [step])
        _give_back(old_fd, step)
        return True

    def publish(self, path: Path) -> None:
        """Give the new file its name. Raises ConfigError where another file has it by now."""
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

    def _reserve(self, step: ByteRange) -> None:
        try:
            os.posix_fallocate(self.fd, step.start, step.length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise CapacityError(
                f"{self._what}: making its file anew: there is no room for {sized(step.length)} more; {MORE_ROOM}"
            ) from error


def _without(ranges: Iterable[ByteRange], taken: Iterable[ByteRange]) -> list[ByteRange]:
    """Return what is left of some ranges without others."""
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


def _give_back(fd: int, step: ByteRange) -> None:
    """Free the pages of a range of the old file, which stays open with its mappings."""
    libc = ctypes.CDLL(None, use_errno=True)
    start, length = ctypes.c_long(step.start), ctypes.c_long(step.length)
    if libc.fallocate(fd, _PUNCH_HOLE, start, length) != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.debug(
            "arena: %d bytes of the old file stay until it is closed: %s", step.length, reason
        )
