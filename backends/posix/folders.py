"""The folder tree below a tier's root, walked by descriptors so that no symbolic link below the root is followed.

It keeps the root open for as long as the backend lives, and knows whether the path still leads to that folder: a root
that was unmounted or deleted is unreachable, never empty. New folders are fsynced into their parents, also those that
somebody else made a moment ago. It knows nothing of objects. What it raises is OSError, for its caller to translate,
save for what it alone knows.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierfall.backends.posix.system import sync_error
from tierfall.core.runtime.bounded_calls import run_in_parallel
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    LostWriteError,
    TierfallError,
    UnreachableError,
)

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SETTLED_MAX = 4096
PROOF_BYTES_MAX = 1 << 20
LISTINGS_AT_ONCE = 64
GROUP = 128
"""Whoever waits for the next object waits until so many folders are listed."""
SLOW_S = 0.0005
SLOW_IN_A_ROW = 4
"""One answer that is slow may only say that the machine is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in a folder; special files and symbolic links are neither file nor folder, and not listed."""

    name: str
    is_folder: bool
    bytes: int
    version: str = ""


def make_root(path: Path) -> None:
    """Create a folder and the missing ones above it, each fsynced into its parent."""
    if path.exists():
        return
    make_root(path.parent)
    path.mkdir(exist_ok=True)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        can_sync(parent)
    finally:
        os.close(parent)


def can_sync(folder: int) -> bool:
    """Fsync a folder; False where this file system has no such thing, OSError where it failed."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


class Folders:
    """Opens, makes, lists and removes folders below one root."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.can_sync = read_only or can_sync(self._root)
        self._identity = _identity(os.fstat(self._root))
        self._settled: dict[str, tuple[int, int]] = {}
        self._shape = threading.Lock()
        self._proof: tuple[str, Callable[[bytes], bool]] | None = None
        self._left: list[int] = []

    def close(self) -> None:
        roots, self._root = [self._root, *self._left], -1
        self._left = []
        for root in roots:
            if root >= 0:
                os.close(root)

    def recognise(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """Take another folder at the path for the same one where its file ``key`` is as ``is_same`` wants it."""
        self._proof = key, is_same

    @property
    def identity(self) -> tuple[int, int]:
        """Which folder it works in: another one once it was mounted anew."""
        return self._identity

    def verify(self, begun_in: tuple[int, int] | None = None) -> None:
        """Raise UnreachableError unless the path still leads to the folder that was opened; and LostWriteError where
        what was ``begun_in`` a folder lies in another one by now."""
        if self._root < 0:
            raise BackendError(f"{self.path}: this backend is closed; open it again")
        try:
            found = _identity(os.stat(self.path))
        except OSError as error:
            raise UnreachableError(
                f"{self.path}: the tier's folder cannot be looked at ({error.strerror}); expected it as it was at "
                "open: mount or restore it"
            ) from error
        if found != self._identity and not self._is_back(found):
            raise UnreachableError(
                f"{self.path}: another folder stands where the tier's was at open (unmounted, or made anew?); "
                "mount it again, or open the tier again"
            )
        if begun_in not in (None, self._identity):
            raise LostWriteError(
                f"{self.path}: the tier's folder was mounted anew since this object was begun: write it anew"
            )

    def _is_back(self, found: tuple[int, int]) -> bool:
        """Go on with the folder that stands there now, if it is the same one, mounted anew."""
        with self._shape:
            if found == self._identity:
                return True  # another thread was faster
            try:
                root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return False
            if not self._is_same(root):
                os.close(root)
                return False
            self._left.append(self._root)  # a call that goes on in it fails by itself
            self._root, self._identity = root, _identity(os.fstat(root))
            self._settled.clear()
            return True

    def _is_same(self, root: int) -> bool:
        """Say whether an open folder holds what proves that it is the tier's."""
        if self._proof is None:
            return False
        key, is_same = self._proof
        try:
            file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=root)
            with os.fdopen(file, "rb") as opened:
                return is_same(opened.read(PROOF_BYTES_MAX))
        except (OSError, TierfallError):  # not there, or not readable: then it proves nothing
            return False

    def sync(self, folder: int, *, state: str) -> None:
        """Fsync an open folder; ``state`` says in the BackendError of a failure what is left then."""
        if not self.can_sync:
            return
        try:
            os.fsync(folder)
        except OSError as error:
            raise sync_error(error, f"fsync of a folder below {self.path}", state) from error

    @contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """Open a folder (a key's parts without the last, '' is the root) for the length of a block."""
        descriptor = self.open(folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, folder: str) -> int:
        """Open a folder; the caller closes it."""
        return self._walk(folder, self._enter)

    def make(self, folder: str) -> int:
        """Open a folder, making what is missing; when it returns, every part of the way is durable."""
        with self._shape:
            return self._walk(folder, self._enter_or_make)

    def remove_empty(self, folder: str) -> None:
        """Remove a folder and those above it, below the root, as far as they are empty."""
        while folder:
            parent, _, name = folder.rpartition("/")
            try:
                with self.opened(parent) as descriptor, self._shape:
                    os.rmdir(name, dir_fd=descriptor)
                    self._settled.pop(folder, None)
            except OSError:
                # Not empty, gone, or not ours to remove: an empty folder is no object and harms nobody.
                return
            folder = parent

    def entries(self, folder: str) -> list[Entry]:
        """List the files and folders in a folder; one that vanishes meanwhile is left out."""
        found = []
        with self.opened(folder) as descriptor, os.scandir(descriptor) as names:
            for each in names:
                entry = _entry(each)
                if entry is not None:
                    found.append(entry)
        return found

    def links(self, folder: str) -> list[str]:
        """Name the symbolic links in a folder."""
        with self.opened(folder) as descriptor, os.scandir(descriptor) as names:
            return sorted(each.name for each in names if each.is_symlink())

    def _walk(self, folder: str, enter: Callable[[int, str, str], int]) -> int:
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
            _mkdir(part, parent)
            child = self._enter(parent, part, path)
        except NotADirectoryError as error:
            raise BackendError(
                f"{self.path / path}: is a file, and tierfall's folder of that name is to be there; move the file away"
            ) from error
        try:
            self._settle(parent, child, path)
        except BaseException:
            os.close(child)
            raise
        return child

    def _settle(self, parent: int, child: int, path: str) -> None:
        # A folder that is there need not be durable: whoever made it may not have come to its fsync yet.
        found = _identity(os.fstat(child))
        if self._settled.get(path) != found:
            self.sync(parent, state=f"the new folder {path!r} may not survive a power cut")
            if len(self._settled) >= _SETTLED_MAX:
                self._settled.clear()
            self._settled[path] = found

    def _refuse_link(self, parent: int, part: str, path: str) -> None:
        if stat.S_ISLNK(os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode):
            raise AccessDeniedError(
                f"{self.path / path}: is a symbolic link, and none is followed below the tier's folder; "
                "put the folder itself there, or make its target a tier of its own"
            )


class Listings:
    """Lists folders for one walk: one after the other on a disk that answers at once, several at a time elsewhere.
    ``at_once`` says how many should be asked for next.

    A thread costs more than a listing that the kernel answers from memory, and far less than a round trip to a file
    server."""

    def __init__(self, entries: Callable[[str], list[Entry]]) -> None:
        self._entries = entries
        self._slow_in_a_row = 0

    @property
    def at_once(self) -> int:
        return GROUP if self._slow_in_a_row >= SLOW_IN_A_ROW else 1

    def list(self, folders: Sequence[str]) -> list[list[Entry]]:
        if self.at_once > 1:
            return run_in_parallel(self._entries, folders, parallel=LISTINGS_AT_ONCE)
        began_s = time.monotonic()
        found = [self._entries(folder) for folder in folders]
        is_slow = time.monotonic() - began_s > SLOW_S * len(folders)
        self._slow_in_a_row = self._slow_in_a_row + 1 if is_slow else 0
        return found


def _mkdir(part: str, parent: int) -> None:
    try:
        os.mkdir(part, dir_fd=parent)
    except FileExistsError:
        # Somebody was faster, which is as good: what it is shows when it is opened.
        return


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


def is_missing(error: OSError) -> bool:
    """Say whether an error means that a name, or a folder on the way to it, is not there."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR)
