"""One arena file: created atomically, checked when attached, mapped, page-locked, grown.

It owns the descriptor and the mappings, and returns one memoryview of the whole file. It must not know regions or free
space. Pages are reserved (``posix_fallocate``) before they are mapped, so that a full file system is an error here and
never a SIGBUS later; they are touched and locked piece by piece (``preparation``).

A mapping is never closed explicitly, since views of it may be alive: it is unmapped with its last view. A growth maps
the file again, so that older views keep their addresses; both mappings share the pages. If the file was removed from
outside, the memory is unchanged, and ends with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.backends.toolkit.mapping import address_of, fork_safe_mapping, populate
from tierfall.core.runtime import pinned
from tierfall.core.runtime.pinned import PageLock
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
)
from tierfall.core.types.values import ByteRange
from tierfall.tiers.arena import layout
from tierfall.tiers.arena.folder import MORE_ROOM, WHAT_HELPS, room_for_arena, sized
from tierfall.tiers.arena.layout import EXTENTS_START, PAGE_BYTES, ArenaHeader

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")

Progress = Callable[[int, int], None]

PIECE_BYTES = 64 << 20
"""Bytes that one call locks. It takes a few milliseconds, in which no other thread can launch work on a device."""
BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""
_STEP_BYTES = 256 << 20
_LOG_FROM_BYTES = 4 << 30
# Cleaners of temporary files delete by age, and stores into a mapping do not change a file's times.
_TOUCH_EVERY_S = 3600.0
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class ArenaFile:
    """The open file with its newest mapping."""

    def __init__(self, path: Path, fd: int, header: ArenaHeader, *, writable: bool) -> None:
        self.path = path
        self.header = header
        self.capacity_bytes = header.capacity_bytes
        self.writable = writable
        self._fd = fd
        self._may_lock = writable
        self._locks: list[tuple[PageLock, mmap.mmap]] = []
        """With the mapping, which stays as long as it is locked."""
        self._locked_pieces: set[int] = set()
        self._touched_pieces: set[int] = set()
        self._mapping: mmap.mmap | None = None
        self.view = memoryview(b"")

    @classmethod
    def create(cls, path: Path, header: ArenaHeader, *, progress: Progress | None) -> ArenaFile:
        """Create under a temporary name, reserve the pages, write the header, and only then rename."""
        what = f"arena {path}"
        with _translate_errors(what, "creating it"):
            if os.path.lexists(path):
                raise ConfigError(f"{what}: there is one already; attach it, or remove {path}")
            partial = _partial(path)
            partial.unlink(missing_ok=True)
            total = EXTENTS_START + header.capacity_bytes
            doing = f"creating it with a capacity of {sized(header.capacity_bytes)}"
            room_for_arena(path.parent).require(total, what=f"{what}: {doing}")
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
            made = cls(path, fd, header, writable=True)
            try:
                made._map(total, progress)
                layout.store(made.view, 0, header.encode())
                os.rename(partial, path)
            except BaseException:
                made.release()
                partial.unlink(missing_ok=True)
                raise
        return made

    @classmethod
    def attach(cls, path: Path, *, run: str, writable: bool) -> ArenaFile:
        """Open and check the arena of an earlier process."""
        what = f"arena {path}"
        with _translate_errors(what, "attaching it"):
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN_FLAGS)
            try:
                size = _check_status(os.fstat(fd), path)
                header = _read_header(fd, path, run)
            except BaseException:
                os.close(fd)
                raise
            made = cls(path, fd, header, writable=writable)
            try:
                made._adopt_size(size)
            except BaseException:
                made.release()
                raise
            if writable:
                _partial(path).unlink(missing_ok=True)
        return made

    def grow(self, capacity_bytes: int, progress: Progress | None) -> None:
        """Enlarge the file, whose length is the capacity, and map it again."""
        what = f"arena {self.path}"
        old, new = EXTENTS_START + self.capacity_bytes, EXTENTS_START + capacity_bytes
        with _translate_errors(what, "growing it"):
            room = room_for_arena(self.path.parent, fd=self._fd)  # the folder may have been removed
            sizes = f"from {sized(self.capacity_bytes)} to {sized(capacity_bytes)}"
            room.require(new - old, what=f"{what}: growing it {sizes}", helps=MORE_ROOM)
            try:
                self._map(new, progress)
            except BaseException:
                os.ftruncate(self._fd, old)
                raise
        self.capacity_bytes = capacity_bytes

    def exists(self) -> bool:
        """Whether the path still names this file. Its time is updated once an hour, against cleaners."""
        with _translate_errors(f"arena {self.path}", "looking for it"):
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
            mine = os.fstat(self._fd)
            if (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
                return False
            if self.writable and time.time() - mine.st_mtime > _TOUCH_EVERY_S:
                os.utime(self._fd)
            return True

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the file's bytes from ``start``. This touches no page of the mapping. If all of them are
        touched already, copying from there takes less time than reading the file."""
        span, mapping = ByteRange(start=start, end=start + len(view)), self._mapping
        if mapping is not None and self._touched_pieces.issuperset(self.pieces_of(span)):
            target = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ctypes.memmove(target, address_of(mapping) + start, len(view))
            return
        with _translate_errors(f"arena {self.path}", "reading it"):
            while view:
                count = os.preadv(self._fd, [view], start)
                if not count:
                    raise IntegrityError(f"arena {self.path}: it is truncated at byte {start}")
                start, view = start + count, view[count:]

    def remove(self) -> None:
        """Delete the file, unless another one has its name by now."""
        with _translate_errors(f"arena {self.path}", "removing it"):
            if self.exists():
                os.unlink(self.path)

    def check_place(self) -> None:
        """Raise ConfigError if no other arena may take the place of this one, whose file was removed: another file has
        its name, or the folder was in memory and is now on disk."""
        with _translate_errors(f"arena {self.path}", "making another one"):
            if os.path.lexists(self.path):
                raise ConfigError(
                    f"arena {self.path}: its file was removed, and another one has its name by now; it is left as it is"
                )
            same = os.stat(self.path.parent).st_dev == os.fstat(self._fd).st_dev
            if not same and not room_for_arena(self.path.parent).in_memory:
                raise ConfigError(
                    f"arena {self.path}: its file system was unmounted, and the one that is there now is not in "
                    "memory; mount it again"
                )

    def release(self) -> None:
        """Unlock the pages, close the descriptor, and drop the view; mappings are unmapped with their last views."""
        for lock, _ in self._locks:
            lock.release()
        self._locks.clear()
        self._mapping = None
        self.view = memoryview(b"")
        os.close(self._fd)

    def _map(self, total: int, progress: Progress | None) -> None:
        """Reserve and map the first ``total`` bytes. The file is never longer than what is reserved of it."""
        status = os.fstat(self._fd)
        if status.st_size < total or status.st_blocks * BLOCK_BYTES < total:
            self._reserve(total, progress)
        self._mapping = fork_safe_mapping(self._fd, total)
        self._touched_pieces.clear()
        self._locked_pieces.clear()
        self.view = memoryview(self._mapping)

    def _reserve(self, total: int, progress: Progress | None) -> None:
        for start in range(0, total, _STEP_BYTES):
            end = min(start + _STEP_BYTES, total)
            try:
                os.posix_fallocate(self._fd, start, end - start)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    raise
                raise CapacityError(
                    f"arena {self.path}: reserving memory: needed {sized(total)}, available were {sized(start)} and "
                    f"less than {sized(end - start)} more; {WHAT_HELPS}"
                ) from error
            if total >= _LOG_FROM_BYTES:
                logger.info("arena %s: %s of %s ready", self.path, sized(end), sized(total))
            if progress is not None:
                progress(end, total)

    # Preparation -------------------------------------------------------------------------------------

    def pieces_of(self, span: ByteRange) -> range:
        """The numbers of the pieces that a range is in."""
        return range(span.start // PIECE_BYTES, -(-span.end // PIECE_BYTES))

    def range_of(self, piece: int) -> ByteRange:
        start, total = piece * PIECE_BYTES, EXTENTS_START + self.capacity_bytes
        return ByteRange(start=start, end=min(start + PIECE_BYTES, total))

    def prepared_pieces(self, device: torch.device | None) -> set[int]:
        """The pieces that are touched and, for copies from a ``device``, locked."""
        locks = device is not None and self._may_lock
        return self._locked_pieces if locks else self._touched_pieces

    def touch(self, span: ByteRange) -> bool:
        """Touch the pages of a range; False if no memory is mapped there. Needs no lock."""
        mapping = self._mapping
        if mapping is None or span.start >= len(mapping):
            return False
        populate(mapping, span.start, min(span.end, len(mapping)))
        return True

    def set_prepared(self, piece: int, device: torch.device | None) -> None:
        """Record that a piece is touched and, for copies from a ``device``, lock it. A refusal is logged once."""
        self._touched_pieces.add(piece)
        if device is None or not self._may_lock or self._mapping is None:
            return
        span = self.range_of(piece)
        lock = pinned.lock_pages(address_of(self._mapping) + span.start, span.length, device)
        if lock.locked:
            self._locks.append((lock, self._mapping))
            self._locked_pieces.add(piece)
            return
        self._may_lock = False
        logger.warning(
            "arena %s: its memory could not be page-locked beyond %s: %s; copies from the GPU continue, slower; raise "
            "`ulimit -l` (or --ulimit memlock=-1 of a container) or set a smaller `capacity`",
            self.path,
            sized(sum(each.length_bytes for each, _ in self._locks)),
            lock.reason,
        )

    def _adopt_size(self, size: int) -> None:
        """Map an attached file of ``size`` bytes; it may have grown since it was created."""
        least = EXTENTS_START + self.header.capacity_bytes
        if size < least:
            raise IntegrityError(
                f"arena {self.path}: it is truncated: {size} bytes, expected {least} at least; {_remove(self.path)}"
            )
        total = size // PAGE_BYTES * PAGE_BYTES
        self.capacity_bytes = total - EXTENTS_START
        if self.writable:
            self._map(total, None)
            return
        self.view = memoryview(
            mmap.mmap(self._fd, total, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        )


def _partial(path: Path) -> Path:
    """The name under which an arena is created; the lock of its slot excludes other processes."""
    return path.with_name(f".{path.name}.partial")


def _check_status(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"arena {path}: not a regular file; {_remove(path)}")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"arena {path}: belongs to user {status.st_uid}, expected {os.geteuid()}: run this as that user, or set "
            "another `folder`"
        )
    return status.st_size


def _read_header(fd: int, path: Path, run: str) -> ArenaHeader:
    what = f"arena {path}"
    try:
        header = layout.read_header(os.pread(fd, PAGE_BYTES, 0), what=what)
    except NotSupportedError as error:
        raise NotSupportedError(f"{error}; use that tierfall, or {_remove(path)}") from error
    except ConfigError as error:
        raise ConfigError(f"{error}; {_remove(path)}") from error
    except IntegrityError as error:
        raise IntegrityError(f"{error}; {_remove(path)}") from error
    if header.run != run:
        raise ConfigError(
            f"{what}: it has run {header.run!r}, expected {run!r}; choose another run name or `folder`, or remove "
            f"{path}"
        )
    return header


def _remove(path: Path) -> str:
    return f"remove {path} (images that only it has are lost) or set another `folder`"


@contextlib.contextmanager
def _translate_errors(what: str, doing: str) -> Iterator[None]:
    """Raise errors of the operating system as errors of this package."""
    try:
        yield
    except FileNotFoundError as error:
        raise KeyNotFoundError(f"{what}: {doing}: {error}; nothing is there") from error
    except PermissionError as error:
        raise AccessDeniedError(f"{what}: {doing}: {error}; check owner and mode") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(
                f"{what}: {doing}: it is a link; remove it, or set another `folder`"
            ) from error
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise ConfigError(
                f"{what}: {doing}: not a regular file; remove it, or set another `folder`"
            ) from error
        raise BackendError(f"{what}: {doing}: {error}") from error
