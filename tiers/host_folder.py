"""The host tier's folder, and the memory that is free for image files there.

It owns the choice of the folder, its safe creation and the arithmetic of memory. Two limits apply: the size of the file
system, and the memory of the machine (or the container) that holds its pages.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tierfall.core.runtime.cores import group_folders
from tierfall.core.types.errors import BackendError, CapacityError, ConfigError
from tierfall.core.types.units import format_size

logger = logging.getLogger("tierfall")

SHARED_MEMORY = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


def default_folder() -> Path:
    """Return ``/dev/shm/tierfall-<uid>``, or, where there is no shared memory, a folder in the temporary folder."""
    name = f"tierfall-{os.geteuid()}"
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY / name
    temporary = _temporary_folder()
    if temporary is None:
        raise ConfigError(
            f"host tier: neither {SHARED_MEMORY} nor a temporary folder is writable: set the host tier's `folder` to a "
            "file system in memory"
        )
    folder = temporary / name
    logger.warning(
        "host tier: %s does not exist or is not writable; images are files in %s, which may be on a disk: set "
        "the host tier's `folder` to a file system in memory",
        SHARED_MEMORY,
        folder,
    )
    return folder


def prepare_folder(path: Path, *, create: bool = True) -> Path:
    """Create ``path`` (mode 0700) where it is missing, and check it; return it as an absolute path. Without ``create``
    check the part of it that is there.

    Trusted is /dev/shm or the temporary folder if the path is below one of them, else the nearest folder above that
    exists. Every component below that is opened without following a link, must belong to this user, and must not be
    writable by others. Raises ConfigError, or BackendError for a folder that cannot be created.
    """
    path = Path(os.path.abspath(path))
    base = _trusted_base(path)
    fd = _open_base(base)
    try:
        place = base
        for name in path.relative_to(base).parts:
            place = place / name
            if not (create or os.path.lexists(place)):
                break
            child = _enter(fd, name, place)
            os.close(fd)
            fd = child
    finally:
        os.close(fd)
    return path


def _trusted_base(path: Path) -> Path:
    for base in (SHARED_MEMORY, _temporary_folder()):
        if base is not None and path != base and path.is_relative_to(base):
            return base
    return next(folder for folder in path.parents if folder.is_dir())


def _temporary_folder() -> Path | None:
    """Return the system's temporary folder; None if there is none that is writable."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def _open_base(base: Path) -> int:
    try:
        return os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"folder {base}: cannot be opened: {error}; set another `folder`"
        ) from error


def _enter(parent: int, name: str, place: Path) -> int:
    """Open ``name`` in ``parent``, created where it is missing; a link is refused."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        logger.debug("folder %s exists already", place)
    except OSError as error:
        raise BackendError(
            f"folder {place}: cannot be created: {error}; set another `folder`"
        ) from error
    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
        )
    except OSError as error:
        raise ConfigError(
            f"folder {place}: is a link, or no folder that this user may open ({error}); remove it, or set another "
            "`folder`"
        ) from error
    try:
        _check_folder(os.fstat(fd), place)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_folder(status: os.stat_result, place: Path) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"folder {place}: belongs to user {status.st_uid}, expected {os.geteuid()}; set another `folder`"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"folder {place}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); run chmod go-w on it, "
            "or set another `folder`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomReport:
    """The memory that is free for files in ``folder``.

    ``memory_free_bytes`` is None where the system does not report it. It bounds files only if the folder's file system
    is in memory (``in_memory``).
    """

    folder: Path
    file_system_free_bytes: int
    memory_free_bytes: int | None
    in_memory: bool
    file_system_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The most that files may take here."""
        if self.in_memory and self.memory_free_bytes is not None:
            return min(self.file_system_free_bytes, self.memory_free_bytes)
        return self.file_system_free_bytes

    def require(self, needed_bytes: int, *, what: str) -> None:
        """Raise CapacityError unless that much is free."""
        if needed_bytes <= self.free_bytes:
            return
        memory = "unknown" if self.memory_free_bytes is None else sized(self.memory_free_bytes)
        raise CapacityError(
            f"{what}: needed {sized(needed_bytes)}, available {sized(self.free_bytes)} (file system of {self.folder}: "
            f"{sized(self.file_system_free_bytes)} free, memory: {memory} free); {WHAT_HELPS}"
        )


WHAT_HELPS = (
    "raise the size of /dev/shm (mount -o remount,size=..., or --shm-size of a container), set a smaller `capacity` of "
    "the host tier, or set its `folder` to a larger file system"
)


def sized(size_bytes: int) -> str:
    """Format a size, rounded and exact."""
    return f"{format_size(size_bytes)} ({size_bytes} bytes)"


def measure_room(folder: Path) -> RoomReport:
    """Measure the memory that is free for files in ``folder``, which exists."""
    try:
        status = os.statvfs(folder)
        in_memory = is_in_memory(folder)
    except OSError as error:
        raise BackendError(f"folder {folder}: asking for its free space failed: {error}") from error
    return RoomReport(
        folder=folder,
        file_system_free_bytes=status.f_bavail * status.f_frsize,
        memory_free_bytes=memory_free_bytes(),
        in_memory=in_memory,
        file_system_bytes=status.f_blocks * status.f_frsize,
    )


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system in memory. Raises OSError."""
    return file_system_of(folder) in _MEMORY_FILE_SYSTEMS


def file_system_of(folder: Path) -> str | None:
    """Return the type of the file system of a folder; None where the kernel does not report it. Raises OSError."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for fields in (line.split() for line in _read(_MOUNTS).splitlines()):
        if len(fields) > 6 and fields[2] == name:
            return fields[fields.index("-") + 1]
    return None


def memory_free_bytes() -> int | None:
    """Return the available memory of the machine, or what the container may still use if that is less."""
    known = [free for free in (_machine_free_bytes(), _container_free_bytes()) if free is not None]
    return min(known, default=None)


def _machine_free_bytes() -> int | None:
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _container_free_bytes() -> int | None:
    """Return the free bytes under the tightest limit of this process's control groups (version 2), page cache included;
    None without a limit."""
    free = []
    for group in group_folders("memory"):
        limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            free.append(max(0, int(limit) - int(used) + _cached_bytes(group)))
    return min(free, default=None)


def _cached_bytes(group: Path) -> int:
    """Return the bytes of files that a control group has in the page cache: it counts them as used, and the kernel
    drops them before it refuses memory. Files in memory are not among them."""
    rows = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(row[1]) for row in rows if row[:1] in (["active_file"], ["inactive_file"]))


def _read(path: Path) -> str:
    """Read a file of /proc or /sys; '' where the kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
