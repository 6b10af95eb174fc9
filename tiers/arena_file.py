"""One arena file: created whole or not at all, checked when attached, mapped, page-locked, grown.

Owns the descriptor and the mappings. It must not know regions or what is free: it hands out one memoryview of the whole
file. Pages are reserved (``posix_fallocate``) before anything is mapped onto them, so a full file system is an error
here and never a SIGBUS later; they are faulted in here too, because a first touch costs ten times the copy.

A mapping is never closed by force: views of it may be alive. It goes when the last view goes. A growth maps the file
again, so older views keep their addresses, and both mappings are the same pages.

A forked child does not get the pages (``fork_safe_mapping``): whatever it writes there changes no image.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from tierfall.core import device
from tierfall.core.device import PageLock
from tierfall.core.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
)
from tierfall.tiers import arena_layout as layout
from tierfall.tiers.arena_folder import WHAT_HELPS, room_for_arena, sized
from tierfall.tiers.arena_layout import EXTENTS_START, PAGE_BYTES, EntryList, Header

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_STEP_BYTES = 256 << 20
# Python's madvise keeps the interpreter lock: 32 MiB are about 10 ms.
_FAULT_BYTES = 32 << 20
_SAY_FROM_BYTES = 4 << 30
# MADV_POPULATE_WRITE of Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23
# Linux on x86, Arm, RISC-V and POWER; the mmap module does not name it.
_MAP_FIXED = 0x10
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class ArenaFile:
    """The open file with its newest mapping."""

    def __init__(
        self, path: Path, fd: int, header: Header, *, writable: bool, page_lock: bool
    ) -> None:
        self.path = path
        self.header = header
        self.capacity_bytes = header.capacity_bytes
        self.writable = writable
        self._fd = fd
        self._want_lock = page_lock and writable
        self._locks: list[PageLock] = []
        self.view = memoryview(b"")

    @classmethod
    def create(
        cls, path: Path, header: Header, *, page_lock: bool, progress: Progress | None
    ) -> ArenaFile:
        """Create under another name, reserve and fill in the header, and only then rename."""
        what = f"arena {path}"
        with _translating(what, "creating it"):
            if os.path.lexists(path):
                raise ConfigError(f"{what}: there is one already; attach it, or remove {path}")
            partial = _partial(path)
            partial.unlink(missing_ok=True)
            total = EXTENTS_START + header.capacity_bytes
            room_for_arena(path.parent).require(total, what=f"{what}: creating it")
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
            made = cls(path, fd, header, writable=True, page_lock=page_lock)
            try:
                made._map(total, progress)
                layout.store(made.view, 0, header.encode())
                made._growths().clear()
                os.rename(partial, path)
            except BaseException:
                made.forget()
                partial.unlink(missing_ok=True)
                raise
        return made

    @classmethod
    def attach(cls, path: Path, *, run: str, writable: bool, page_lock: bool) -> ArenaFile:
        """Open and check an arena that an earlier process left."""
        what = f"arena {path}"
        with _translating(what, "attaching it"):
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN_FLAGS)
            try:
                size = _check_status(os.fstat(fd), path)
                header = _read_header(fd, path, run)
            except BaseException:
                os.close(fd)
                raise
            made = cls(path, fd, header, writable=writable, page_lock=page_lock)
            try:
                made._adopt_size(size)
            except BaseException:
                made.forget()
                raise
            if writable:
                _partial(path).unlink(missing_ok=True)
        return made

    def grow(self, capacity_bytes: int, progress: Progress | None) -> None:
        """Enlarge the file and map it again; the new capacity counts from the moment it is written down."""
        what = f"arena {self.path}"
        entry = layout.encode_growth(capacity_bytes)
        growths = self._growths()
        if growths.room_bytes() < len(entry):
            raise CapacityError(
                f"{what}: growing it: it has grown too often; set the host tier's `capacity` and start anew"
            )
        old, new = EXTENTS_START + self.capacity_bytes, EXTENTS_START + capacity_bytes
        with _translating(what, "growing it"):
            room_for_arena(self.path.parent).require(new - old, what=f"{what}: growing it")
            try:
                self._map(new, progress)
            except BaseException:
                os.ftruncate(self._fd, old)
                raise
        growths.append(entry)
        self.capacity_bytes = capacity_bytes

    def is_there(self) -> bool:
        """Whether the path still names this file."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def remove(self) -> None:
        """Delete the file, unless another one bears its name by now."""
        with _translating(f"arena {self.path}", "removing it"):
            if self.is_there():
                os.unlink(self.path)

    def forget(self) -> None:
        """Unlock the pages, close the descriptor, and let the mappings go with their last views."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        self.view = memoryview(b"")
        os.close(self._fd)

    def _growths(self) -> EntryList:
        return layout.growths(self.view, what=f"arena {self.path}")

    def _map(self, total: int, progress: Progress | None) -> None:
        """Reserve, map and fault in the first ``total`` bytes."""
        if os.fstat(self._fd).st_size < total:
            os.ftruncate(self._fd, total)
        mapping = fork_safe_mapping(self._fd, total)
        for start in range(0, total, _STEP_BYTES):
            end = min(start + _STEP_BYTES, total)
            self._reserve(start, end, total)
            _fault_in(mapping, start, end)
            if total >= _SAY_FROM_BYTES:
                logger.info("arena %s: %s of %s ready", self.path, sized(end), sized(total))
            if progress is not None:
                progress(end, total)
        self._lock_pages(mapping, total)
        self.view = memoryview(mapping)

    def _reserve(self, start: int, end: int, total: int) -> None:
        try:
            os.posix_fallocate(self._fd, start, end - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise CapacityError(
                f"arena {self.path}: reserving memory: needed {sized(total)}, available were {sized(start)} and less "
                f"than {sized(end - start)} more; {WHAT_HELPS}"
            ) from error

    def _lock_pages(self, mapping: mmap.mmap, total: int) -> None:
        if not self._want_lock or not device.cuda_available():
            return
        lock = device.lock_pages(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), total)
        if lock.locked:
            self._locks.append(lock)
            return
        self._want_lock = False
        logger.warning(
            "arena %s: its %s could not be page-locked: %s; copies from the GPU go on, slower; raise `ulimit -l` (or "
            "--ulimit memlock=-1 of a container) or set a smaller `capacity`",
            self.path,
            sized(total),
            lock.reason,
        )

    def _adopt_size(self, size: int) -> None:
        """Map an attached file as far as its own record of its capacity says."""
        what = f"arena {self.path}"
        self._peek_capacity(size)
        total = EXTENTS_START + self.capacity_bytes
        if size < total:
            raise IntegrityError(
                f"{what}: it is truncated: {size} bytes, expected {total}; {_remove(self.path)}"
            )
        if not self.writable:
            self.view = memoryview(
                mmap.mmap(self._fd, total, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            )
            return
        if size > total:
            # A growth that was killed before it counted: nothing lies there.
            os.ftruncate(self._fd, total)
        self._map(total, None)

    def _peek_capacity(self, size: int) -> None:
        what = f"arena {self.path}"
        if size < EXTENTS_START:
            raise IntegrityError(
                f"{what}: it is truncated: {size} bytes, expected at least {EXTENTS_START}; {_remove(self.path)}"
            )
        block = memoryview(bytearray(os.pread(self._fd, layout.BLOCK_BYTES, 0)))
        try:
            growths = layout.growths(block, what=what)
            self.capacity_bytes = layout.read_capacity(self.header, growths, what=what)
        except IntegrityError as error:
            raise IntegrityError(f"{error}; {_remove(self.path)}") from error


def _partial(path: Path) -> Path:
    """The name under which an arena is created; its slot's lock makes us the only ones to use it."""
    return path.with_name(f".{path.name}.partial")


def _check_status(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"arena {path}: not a regular file; {_remove(path)}")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"arena {path}: belongs to user {status.st_uid}, expected {os.geteuid()}; remove it, or set another "
            "`folder`"
        )
    return status.st_size


def _read_header(fd: int, path: Path, run: str) -> Header:
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
            f"{what}: it holds run {header.run!r}, expected {run!r}; choose another run name or `folder`, or remove "
            f"{path}"
        )
    return header


def _remove(path: Path) -> str:
    return f"remove {path} (what only it holds is lost) or set another `folder`"


_mappings: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The writable mappings of this process, with their addresses."""


def fork_safe_mapping(fd: int, length_bytes: int) -> mmap.mmap:
    """Map a file, shared and writable, in this process alone.

    The kernel leaves the range out of a forked child. A child of ``os.fork`` gets zeros at the same addresses, which it
    may read and not write.
    """
    mapping = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED)
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings[mapping] = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return mapping


def _cover_in_child() -> None:
    """Put zeros where the mappings of the parent were. Left open, the range could be given to another mapping of the
    child, which the end of the parent's would then unmap. Read-only memory is never counted as committed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for mapping, address in list(_mappings.items()):
        where = (ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)))
        if libc.mmap(*where, mmap.PROT_READ, flags, -1, ctypes.c_long(0)) != address:
            logger.debug("fork: the arena's range was not covered: errno %d", ctypes.get_errno())


os.register_at_fork(after_in_child=_cover_in_child)


def _fault_in(mapping: mmap.mmap, start: int, end: int) -> None:
    """Give every page of the range its memory and its place in the page table."""
    for low in range(start, end, _FAULT_BYTES):
        high = min(low + _FAULT_BYTES, end)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, low, high - low)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A kernel without it: read one byte of each page.
            memoryview(mapping)[low : high : mmap.PAGESIZE].tobytes()


@contextlib.contextmanager
def _translating(what: str, doing: str) -> Iterator[None]:
    """Turn what the operating system refuses into the errors of this project."""
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
