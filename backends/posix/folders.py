"""The folder tree below a tier's root, opened by descriptors, so that no symbolic link below the root is followed.

The root is kept open as long as the backend, and compared with the path in each call: a root that was unmounted or
deleted is unreachable, never empty. New folders are fsynced into their parents, those of other processes included. This
module knows no objects. It raises OSErrors, which its caller translates, and BackendErrors for its own checks.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tierfall.backends.posix.system import sync_error
from tierfall.backends.toolkit.keys import is_component
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    LostWriteError,
    TierfallError,
    UnreachableError,
)

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SYNCED_MAX = 4096
PROOF_BYTES_MAX = 1 << 20
APPEARS_S = 2.0
LISTINGS_AT_ONCE = 64
GROUP = 128
"""Subfolders that are listed concurrently before a scan yields the first object of any."""
_CURE = (
    "Mount it again, or move it back, and copies go on. If it was deleted, end the run by close, and start it again: "
    "the start makes a new folder (of a shared tier, after 'tierfall forget'), and copies there what memory and other "
    "tiers have"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder in a folder. Special files and symbolic links are not listed."""

    name: str
    is_folder: bool
    bytes: int
    version: str = ""


def make_root(path: Path) -> None:
    """Create a folder and the missing ones above it, each fsynced into its parent."""
    if path.exists():
        return
    make_root(path.parent)
    _make(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        can_sync(parent)
    finally:
        os.close(parent)


def _make(path: Path | str, parent: int | None = None) -> None:
    """Create a folder. If another node is creating it, wait until it appears: a parallel file system may first refuse
    the name, and then find no such folder for some milliseconds."""
    with suppress(FileExistsError):
        os.mkdir(path, dir_fd=parent)
        return
    deadline_s = time.monotonic() + APPEARS_S
    while time.monotonic() < deadline_s:
        with suppress(FileNotFoundError):
            os.stat(path, dir_fd=parent, follow_symlinks=False)
            return
        time.sleep(0.01)


def can_sync(folder: int) -> bool:
    """Fsync a folder; False where the file system does not support that. Raises OSError where it failed."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


class Folders:
    """Opens, creates, lists and removes folders below one root."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.can_sync = read_only or can_sync(self._root)
        self._identity = _identity(os.fstat(self._root))
        self._synced: dict[str, tuple[int, int]] = {}
        """Folders that are durable in their parents, by path, with device and inode."""
        self._tree_lock = threading.Lock()
        """Held while a folder is created or removed."""
        self._proof: tuple[str, Callable[[bytes], bool]] | None = None
        self._old_roots: list[int] = []

    def close(self) -> None:
        roots, self._root = [self._root, *self._old_roots], -1
        self._old_roots = []
        for root in roots:
            if root >= 0:
                os.close(root)

    def set_identity_check(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """Accept another folder at the path as the same one if ``is_same`` accepts the bytes of its file ``key``."""
        self._proof = key, is_same

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the root; they change when it is mounted anew."""
        return self._identity

    def verify(self, begun_in: tuple[int, int] | None = None) -> None:
        """Raise UnreachableError unless the path still leads to the folder that was opened. Raise LostWriteError if the
        root was mounted anew since its identity was ``begun_in``."""
        if self._root < 0:
            raise BackendError(f"{self.path}: this backend is closed; open it again")
        try:
            found = _identity(os.stat(self.path))
        except FileNotFoundError as error:
            raise UnreachableError(
                f"{self.path}: the tier's folder is gone: it was deleted, moved or unmounted. {_CURE}"
            ) from error
        except OSError as error:
            raise UnreachableError(
                f"{self.path}: the tier's folder cannot be looked at ({error.strerror}): check its file system"
            ) from error
        if found != self._identity and not self._is_back(found):
            raise UnreachableError(
                f"{self.path}: the folder is not the one that was opened: that one was unmounted, moved, or deleted "
                f"and created again. {_CURE}"
            )
        if begun_in not in (None, self._identity):
            raise LostWriteError(
                f"{self.path}: the tier's folder was mounted anew since this object was begun: write it anew"
            )

    def _is_back(self, found: tuple[int, int]) -> bool:
        """Continue with the folder that is at the path now, if it is the same one, mounted anew."""
        with self._tree_lock:
            if found == self._identity:
                return True  # another thread has accepted it
            try:
                root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return False
            if not self._is_same(root):
                os.close(root)
                return False
            # kept open: other threads may use it, and their calls fail
            self._old_roots.append(self._root)
            self._root, self._identity = root, _identity(os.fstat(root))
            self._synced.clear()
            return True

    def _is_same(self, root: int) -> bool:
        """Whether an open folder has the file that identifies it as the tier's."""
        if self._proof is None:
            return False
        key, is_same = self._proof
        try:
            file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=root)
            with os.fdopen(file, "rb") as opened:
                return is_same(opened.read(PROOF_BYTES_MAX))
        except (OSError, TierfallError):  # missing or unreadable
            return False

    def sync(self, folder: int, *, state: str) -> None:
        """Fsync an open folder. ``state`` is the state after a failure, for the message of the BackendError."""
        if not self.can_sync:
            return
        try:
            os.fsync(folder)
        except OSError as error:
            raise sync_error(error, f"fsync of a folder below {self.path}", state) from error

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """Open a folder ('' is the root) for a block."""
        descriptor = self.open(folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, folder: str) -> int:
        """Open a folder; the caller closes it."""
        return self._open_path(folder, self._enter)

    def make(self, folder: str) -> int:
        """Open a folder, and create it and those above it where they are missing; all of them are durable on return."""
        with self._tree_lock:
            return self._open_path(folder, self._enter_or_make)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder if it is empty, then the folders above it, up to the root."""
        while folder:
            parent, _, name = folder.rpartition("/")
            try:
                with self.opened(parent) as descriptor, self._tree_lock:
                    os.rmdir(name, dir_fd=descriptor)
                    self._synced.pop(folder, None)
            except OSError:
                # Not empty, removed already, or not permitted: an empty folder is no object.
                return
            folder = parent

    def entries(self, folder: str) -> list[Entry]:
        """List the files and folders in a folder, without those that are removed meanwhile."""
        found = []
        with self.opened(folder) as descriptor, os.scandir(descriptor) as names:
            for each in names:
                entry = _entry(each)
                if entry is not None:
                    found.append(entry)
        return found

    def _open_path(self, folder: str, enter: Callable[[int, str, str], int]) -> int:
        descriptor = os.dup(self._root)
        path = ""
        for part in folder.split("/") if folder else ():
            path = f"{path}/{part}" if path else part
            try:
                child = enter(descriptor, part, path)
            finally:
                os.close(descriptor)
            descriptor = child
        return descriptor

    def _enter(self, parent: int, part: str, path: str) -> int:
        try:
            return os.open(part, FOLDER_FLAGS, dir_fd=parent)
        except NotADirectoryError:
            self._refuse_link(parent, part, path)
            raise

    def _enter_or_make(self, parent: int, part: str, path: str) -> int:
        try:
            child = self._enter(parent, part, path)
        except FileNotFoundError:
            # The open that follows fails if it is no folder.
            _make(part, parent)
            child = self._enter(parent, part, path)
        except NotADirectoryError as error:
            raise BackendError(
                f"{self.path / path}: is a file, and tierfall's folder of that name is to be there; move the file away"
            ) from error
        try:
            self._sync_new(parent, child, path)
        except BaseException:
            os.close(child)
            raise
        return child

    def _sync_new(self, parent: int, child: int, path: str) -> None:
        # An existing folder need not be durable: another process may have created it and not reached its fsync.
        found = _identity(os.fstat(child))
        if self._synced.get(path) != found:
            self.sync(parent, state=f"the new folder {path!r} may not survive a power cut")
            if len(self._synced) >= _SYNCED_MAX:
                self._synced.clear()
            self._synced[path] = found

    def _refuse_link(self, parent: int, part: str, path: str) -> None:
        if stat.S_ISLNK(os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode):
            raise AccessDeniedError(
                f"{self.path / path} is a symbolic link, and none is followed below the tier's folder; "
                "put the folder itself there, or make its target a tier of its own"
            )


def walk(list_folder: Callable[[str], list[Entry]], prefix: str) -> Iterator[tuple[str, Entry]]:
    """Yield every file and folder below a prefix with its path, without what is below a folder whose name no key has.
    The files are sorted as keys. Subfolders are listed concurrently: a file server takes a round trip for each."""
    yield from _below(list_folder, prefix, list_folder(prefix))


def _below(
    list_folder: Callable[[str], list[Entry]], prefix: str, entries: list[Entry]
) -> Iterator[tuple[str, Entry]]:
    entries = [entry for entry in entries if not entry.is_folder or is_component(entry.name)]
    entries.sort(key=lambda entry: f"{entry.name}/" if entry.is_folder else entry.name)
    pending = [f"{prefix}{entry.name}/" for entry in entries if entry.is_folder]
    listed: dict[str, list[Entry]] = {}
    for entry in entries:
        path = prefix + entry.name
        yield path, entry
        if entry.is_folder:
            if not listed:
                group, pending = pending[:GROUP], pending[GROUP:]
                found = run_in_parallel(list_folder, group, parallel=LISTINGS_AT_ONCE)
                listed = dict(zip(group, found, strict=True))
            yield from _below(list_folder, f"{path}/", listed.pop(f"{path}/"))


def _entry(found: os.DirEntry[str]) -> Entry | None:
    try:
        if found.is_dir(follow_symlinks=False):
            return Entry(name=found.name, is_folder=True, bytes=0)
        if not found.is_file(follow_symlinks=False):
            return None
        status = found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    version = f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
    return Entry(name=found.name, is_folder=False, bytes=status.st_size, version=version)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def is_missing(error: OSError, *, is_read: bool = False) -> bool:
    """Whether an error means that a file, or a folder above it, does not exist. To a read, a file in place of a folder
    is an obstacle: what was to be there may still exist."""
    return error.errno == errno.ENOENT or (error.errno == errno.ENOTDIR and not is_read)
