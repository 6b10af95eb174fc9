"""The run lock: which process owns a run's host memory on this machine.

It is a POSIX record lock (``fcntl.lockf``), which the kernel releases when the owner dies even if forked children (data
loader workers) survive; a ``flock`` would be inherited by them. A process loses a record lock when it closes *any*
descriptor of the file. So a process opens a lock file only once, and consults a registry of its locks before it opens
any file.

The file remains after a release. If another process unlinks it, ``take`` detects that it locked an inode without a
name, and retries; the owner locks a new file (``reacquire``). A forked child does not own its parent's locks.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import stat
import struct
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierfall.core.format import documents
from tierfall.core.types.errors import BackendError, ConfigError, IntegrityError, LockError

logger = logging.getLogger("tierfall")

_MAX_TRIES = 100
_POLL_S = 0.05
_MAX_OWNER_BYTES = 4096
_TOUCH_EVERY_S = 3600.0  # cleaners of temporary files delete by age
# Linux's struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOwner:
    """The process that holds a lock; a field is None while the file lacks it.

    ``start_ticks`` is the process's start time in clock ticks since boot, which detects a reused pid. ``command`` is
    the name of the command that the process carries out; empty for a trainer. ``elsewhere``: the process is in another
    pid namespace, as that of another container, where ``pid`` is its number; here that is another process's, or none's.
    """

    pid: int
    start_ticks: int | None = None
    node: str | None = None
    since_wall_s: float | None = None
    command: str = ""
    elsewhere: bool = False

    @property
    def process(self) -> str:
        """What messages call the process."""
        return "a process of another container" if self.elsewhere else f"process {self.pid}"

    def __str__(self) -> str:
        since = "an unknown time"
        if self.since_wall_s is not None:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_wall_s))
        node = f" on {self.node}" if self.node else ""
        what = f"the command {self.command!r}, " if self.command else ""
        return f"{what}{self.process}{node}, since {since}"


# Per process, as the kernel's record locks are; keyed by (st_dev, st_ino).
_registry: dict[tuple[int, int], LockOwner] = {}
_registry_guard = threading.Lock()


class RunLock:
    """Ownership of one slot of a run on this machine, from ``acquire`` to ``release`` or the process's death."""

    def __init__(self, path: Path, run: str, fd: int, identity: tuple[int, int]) -> None:
        self.path = path
        self._run = run
        self._fd = fd
        self._identity = identity
        self._pid = os.getpid()
        self._released = False

    @classmethod
    def acquire(cls, path: Path, *, run: str, command: str = "", wait_s: float = 0.0) -> RunLock:
        """Take the lock at ``path``, whose folder exists, for a trainer or for a ``command``. While a command holds it,
        such as a drain of an earlier start's memory, wait for ``wait_s`` seconds; that is logged.

        LockError, naming the owner, if another process holds it. ConfigError if this process holds it already, or the
        file is a link, not a regular file, or another user's.
        """
        until_s = time.monotonic() + wait_s
        waits_for: LockOwner | None = None
        while True:
            try:
                return cls._acquire_now(path, run, command)
            except LockError:
                owner = cls.owner(path)
                is_trainer = owner is not None and not owner.command
                if is_trainer or time.monotonic() >= until_s:
                    raise
            if owner is not None and owner != waits_for:
                waits_for = owner
                text = "run %s is held by %s: waiting for it, for %g s at most"
                logger.warning(text, run, owner, wait_s)
            time.sleep(_POLL_S)

    @classmethod
    def _acquire_now(cls, path: Path, run: str, command: str) -> RunLock:
        with _registry_guard:
            for _ in range(_MAX_TRIES):
                identity = _identity_at(path)
                if identity is not None and _held_by(identity) is not None:
                    raise _second_error(path, run)
                lock = cls._take_once(path, run, command)
                if lock is not None:
                    return lock
        raise LockError(
            f"lock of run {run}: {path} was removed {_MAX_TRIES} times while it was being locked; find out who "
            "removes it"
        )

    @classmethod
    def _take_once(cls, path: Path, run: str, command: str) -> RunLock | None:
        fd = _open(path, os.O_RDWR | os.O_CREAT, run)
        identity = _identity(os.fstat(fd))
        held = _held_by(identity)
        if held is not None:
            # The name now refers to a file that this process has locked. Closing this descriptor would release the
            # lock, so it is left open.
            raise _second_error(path, run)
        try:
            _check_file(os.fstat(fd), path, run)
            _lock(fd, path, run)
            if _identity_at(path) != identity:
                os.close(fd)
                return None
            try:
                owner = _write_owner(fd, run, command)
            except OSError as error:
                raise BackendError(
                    f"lock of run {run}: writing {path} failed: {error}; free space there, or set another `folder`"
                ) from error
        except BaseException:
            os.close(fd)
            raise
        _registry[identity] = owner
        return cls(path, run, fd, identity)

    @staticmethod
    def owner(path: Path) -> LockOwner | None:
        """The owner of the lock at ``path``, which is left untouched; None if it is free or there is no file."""
        with _registry_guard:
            identity = _identity_at(path)
            if identity is None:
                return None
            held = _held_by(identity)
            if held is not None:
                return held
            fd = _open(path, os.O_RDONLY, "?")
            held = _held_by(_identity(os.fstat(fd)))
            if held is not None:
                return held  # the descriptor stays open, too
            try:
                return _owner_of(fd, path)
            finally:
                os.close(fd)

    @property
    def held(self) -> bool:
        """Whether this process owns the lock; false after a release, and in a forked child."""
        return not self._released and os.getpid() == self._pid

    def is_file_intact(self) -> bool:
        """Whether the path still refers to the locked file, or the lock is not held. Touches a file that looks unused.
        BackendError if that cannot be determined."""
        with _registry_guard:
            if not self.held:
                return True
            if _identity_at(self.path) != self._identity:
                return False
            if time.time() - os.fstat(self._fd).st_mtime > _TOUCH_EVERY_S:
                os.utime(self._fd)
            return True

    def reacquire(self) -> None:
        """Lock a new file at the path if the locked one was removed; its folder exists. Raises as ``acquire`` does, and
        then keeps the old lock."""
        held = None if self.is_file_intact() else _registry.get(self._identity)
        if held is None:
            return
        other = RunLock.acquire(self.path, run=self._run, command=held.command)
        with _registry_guard:
            if not self._released:
                self._fd, other._fd = other._fd, self._fd
                self._identity, other._identity = other._identity, self._identity
        other.release()

    def release(self) -> None:
        """Release the lock; the file remains. In a forked child only the descriptors are closed. May be called
        twice."""
        with _registry_guard:
            if self._released:
                return
            self._released = True
            _registry.pop(self._identity, None)
            if os.getpid() == self._pid:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)


def _second_error(path: Path, run: str) -> ConfigError:
    return ConfigError(
        f"a second Checkpointer of run {run!r} in this process (lock {path}): use the first one, close it before "
        "opening another, or choose another run name"
    )


def _held_by(identity: tuple[int, int]) -> LockOwner | None:
    """This process's lock on a file; an entry inherited by a fork is the parent's."""
    held = _registry.get(identity)
    return held if held is not None and held.pid == os.getpid() else None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_at(path: Path) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"lock: stat of {path} failed: {error}") from error


def _open(path: Path, flags: int, run: str) -> int:
    # O_NONBLOCK: opening a pipe of that name must not block; no effect on a regular file.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _unusable_error(
                path, run, "a link, a folder or a pipe, not a regular file"
            ) from error
        raise BackendError(
            f"lock of run {run}: opening {path} failed: {error}; expected a folder that this user may write to"
        ) from error


def _check_file(status: os.stat_result, path: Path, run: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _unusable_error(path, run, "not a regular file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"lock of run {run}: {path} is owned by user {status.st_uid}, not by {os.geteuid()}: run this as that "
            "user, or set another `folder` or run name"
        )


def _unusable_error(path: Path, run: str, why: str) -> ConfigError:
    return ConfigError(
        f"lock of run {run}: {path} is {why}; remove it, or set another `folder` or run name"
    )


def _lock(fd: int, path: Path, run: str) -> None:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            owner = _owner_of(fd, path) or "a process that ended just now"
            raise LockError(
                f"run {run!r} is owned on this machine by {owner} (lock {path}): wait for it, end it, or choose "
                "another run name"
            ) from error
        raise BackendError(
            f"lock of run {run}: locking {path} failed: {error}; set `folder` to a file system with record locks"
        ) from error


def _owner_of(fd: int, path: Path) -> LockOwner | None:
    """The lock's owner according to the kernel, with the file's details if they are of the same process."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))
    if kind == fcntl.F_UNLCK:
        return None
    recorded = _read_owner(fd, path)
    # The pid of a process in another pid namespace is reported as 0 or less.
    if pid <= 0:
        return replace(recorded or LockOwner(pid=pid), elsewhere=True)
    return recorded if recorded is not None and recorded.pid == pid else LockOwner(pid=pid)


def _write_owner(fd: int, run: str, command: str) -> LockOwner:
    owner = LockOwner(
        pid=os.getpid(),
        start_ticks=own_start_ticks(),
        node=platform.node(),
        since_wall_s=time.time(),
        command=command,
    )
    note = documents.seal(
        {
            "run": run,
            "pid": owner.pid,
            "start_ticks": owner.start_ticks,
            "node": owner.node,
            "since_wall_s": owner.since_wall_s,
            "command": owner.command,
        }
    )
    os.ftruncate(fd, 0)
    os.pwrite(fd, note, 0)
    return owner


def _read_owner(fd: int, path: Path) -> LockOwner | None:
    """Parse the owner's record in the file; None if it is missing or incomplete, since the lock itself is what
    counts."""
    data = os.pread(fd, _MAX_OWNER_BYTES, 0)
    try:
        note = documents.open_sealed(data, what=f"owner note in {path}")
    except (IntegrityError, ConfigError):
        return None
    pid = note.get("pid")
    if not isinstance(pid, int):
        return None
    return LockOwner(
        pid=pid,
        start_ticks=_typed(note.get("start_ticks"), int),
        node=_typed(note.get("node"), str),
        since_wall_s=_typed(note.get("since_wall_s"), int | float),
        command=_typed(note.get("command"), str) or "",
    )


def _typed(value: Any, kind: Any) -> Any:
    return value if isinstance(value, kind) else None


def own_start_ticks() -> int | None:
    """This process's start time in clock ticks since boot, field 22 of /proc/self/stat; None without /proc."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may contain spaces and parentheses.
    return int(text.rpartition(")")[2].split()[19])
