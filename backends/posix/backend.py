"""A backend of files below one folder: local disks and mounted file systems.

A key is a path below the root. An unfinished object is a file in the folder of its key, under a name that no key has.
Folders are created with their first object and removed with their last. Symbolic links are followed up to the root,
never below it. Wrappers retry and throttle.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierfall.backends.posix.folders import Entry, Folders, Listings, is_missing, make_root
from tierfall.backends.posix.probe import UNPROBED, Exclusive, direct_block, probe
from tierfall.backends.posix.system import (
    BOUNCE_BYTES,
    DIRECT_BYTES_MIN,
    backend_error,
    is_cached,
    read_whole,
    read_without_waiting,
    translated,
)
from tierfall.backends.posix.writer import PosixWriter, PosixWriterContext
from tierfall.backends.toolkit.base import BackendBase, Extent
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
    is_unfinished,
)
from tierfall.backends.toolkit.views import BouncePool, flat
from tierfall.core.types.backend import Publish, StoredObject, Traits
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyNotFoundError,
    UnreachableError,
)

# O_NONBLOCK: opening a FIFO would block. It has no effect on files.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_PARALLEL = 4


class PosixBackend(BackendBase):
    """Stores objects as files below ``root``; see ``core.types.backend.Backend``.

    ``root`` is created where it is missing, and must be a writable folder. ``direct_io``: use direct I/O where a probe
    at open shows that it works. While the backend is open, a root that is unmounted, deleted or replaced raises
    UnreachableError, until the identity check accepts it again. Call ``close`` after all other calls have returned.

    ``read_only``: nothing is created, probed or changed. A missing root is UnreachableError, since it may not be
    mounted; writing and deleting raise AccessDeniedError. Each file is read by direct I/O where the kernel supports it
    for that file, so the traits promise none. ``read_cached`` is disabled: inspection reads the medium, not the page
    cache.

    Raises AccessDeniedError or another BackendError, with the folder, where it cannot be used.
    """

    _not_conditional = (
        "this file system has neither hard links nor an exclusive rename, so nothing can be created conditionally "
        "there"
    )

    def __init__(
        self, root: Path | str, *, direct_io: bool = True, read_only: bool = False
    ) -> None:
        self._path = Path(os.path.abspath(root))
        super().__init__(str(self._path), read_only=read_only)
        self._ask_kernel = read_only and direct_io
        self._folders = _open_root(self._path, read_only=read_only)
        try:
            with self._folders.opened("") as folder:
                self._medium = (
                    UNPROBED if read_only else probe(folder, self.place, direct_io=direct_io)
                )
        except BaseException:
            self._folders.close()
            raise
        block_bytes = self._medium.direct_bytes
        pool = BouncePool(
            block_bytes=BOUNCE_BYTES, alignment_bytes=max(block_bytes, 1), keep=_MAX_PARALLEL
        )
        self._active: set[str] = set()
        """The file names of active writers."""
        self._context = PosixWriterContext(
            folders=self._folders, medium=self._medium, pool=pool, active=self._active
        )
        self._traits = Traits(
            durable=self._folders.can_sync,
            atomic_replace=True,
            conditional_create=self._medium.exclusive is not Exclusive.NONE,
            alignment_bytes=max(block_bytes, 1),
            direct_io=block_bytes > 0,
            max_parallel=_MAX_PARALLEL,
            needs_sync=self._folders.can_sync and not read_only,
            cache_never_waits=self._medium.cache_never_waits,
        )

    def _create(self, key: str, extent: Extent, publish: Publish) -> PosixWriter:
        self._folders.verify()
        with translated(self._what("create", key)):
            return PosixWriter(self._context, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        if offset < 0:
            raise BackendError(f"{self._what('read', key)}: the offset {offset} is negative")
        with self._lookup("read", key), self._opened(key) as (file, _):
            block_bytes = direct_block(file) if self._ask_kernel else self._medium.direct_bytes
            if read_whole(file, data, offset, block_bytes=block_bytes) < data.nbytes:
                end, length = offset + data.nbytes, os.fstat(file).st_size
                raise self._short_read(self._what("read", key), offset, end, length)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """See ``Backend``. False where the backend is read-only: inspection reads the medium."""
        check_key(key)
        with self._lookup("read", key), self._opened(key) as (file, status):
            if not self._in_page_cache(file, status, offset, end - offset):
                return False
            for view in views:
                data = flat(view, writable=True)
                if self._read_cached(file, data, offset) < data.nbytes:
                    end, length = offset + data.nbytes, os.fstat(file).st_size
                    raise self._short_read(self._what("read", key), offset, end, length)
                offset += data.nbytes
        return True

    def stat(self, key: str) -> StoredObject:
        check_key(key)
        parent, _, leaf = key.rpartition("/")
        with self._lookup("stat", key), self._folders.opened(parent) as folder:
            status = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
            self._check_regular(status, key)
        return StoredObject(key=key, bytes=status.st_size)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        return (
            StoredObject(key=key, bytes=entry.bytes, version=entry.version)
            for key, entry in Listings(self._entries).walk(prefix)
            if not entry.is_folder and is_key(key)
        )

    def names(self, folder: str) -> list[str]:
        """Return all names in a folder, also those that ``scan`` leaves out, such as symbolic links."""
        with (
            suppress(KeyNotFoundError),
            self._lookup("list", check_key(folder)),
            self._folders.opened(folder) as descriptor,
        ):
            return os.listdir(descriptor)
        return []

    def delete(self, key: str) -> None:
        self.delete_some([key])

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. Deletes the keys in the folder of the first one, and syncs that folder once."""
        keys = [check_key(key) for key in keys]
        self._check_writable(self._what("delete", keys[0]))
        parent = _folder_of(keys[0])
        selected = [key for key in keys if _folder_of(key) == parent]
        # A missing folder has no objects to delete.
        with suppress(KeyNotFoundError):
            with self._lookup("delete", keys[0]), self._folders.opened(parent) as folder:
                removed = self._unlink_all(folder, selected)
            if removed:
                self._folders.remove_empty(parent)
        return [key for key in keys if _folder_of(key) != parent]

    def sync(self, folder: str) -> None:
        """See ``SyncedBackend``. The folders above are durable: a writer syncs them before it publishes."""
        check_key(folder)
        self._check_writable(self._what("sync", folder))
        with self._lookup("sync", folder), self._folders.opened(folder) as descriptor:
            state = f"what is visible in {folder!r} may not survive a power cut: write it anew"
            self._folders.sync(descriptor, state=state)

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        self._check_writable(self._what("clean up", prefix))
        found = list(Listings(self._entries).walk(prefix))
        dead: dict[str, list[str]] = {}
        for path, entry in found:
            unfinished = not entry.is_folder and is_unfinished(entry.name)
            if unfinished and entry.name not in self._active:
                dead.setdefault(path.removesuffix(entry.name), []).append(entry.name)
        count = 0
        for folder, names in dead.items():
            # A folder that is removed meanwhile had no other files.
            with suppress(KeyNotFoundError):
                count += self._discard(folder, names)
        parents = {_folder_of(path) for path, _ in found}
        for path, entry in found:
            # A kill after the deletion of the last file leaves its folder. No folder of tierfall has a dot in its name:
            # such a folder stands in the place of a file, and is not removed.
            if entry.is_folder and path not in parents and "." not in entry.name:
                self._folders.remove_empty(path)
        if not found:
            self._folders.remove_empty(prefix.rstrip("/"))
        return count

    def set_identity_check(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """After the root is mounted anew, continue if ``is_same`` accepts the bytes of its object ``key``."""
        self._folders.set_identity_check(check_key(key), is_same)

    def close(self) -> None:
        """Close the root. Open writers may still abort, but not publish."""
        self._folders.close()

    @contextmanager
    def _lookup(self, operation: str, key: str) -> Iterator[None]:
        """Raise the OSErrors of the block as BackendErrors. KeyNotFoundError only while the root is the folder that was
        opened: an unmounted root has no files either.
        """
        what = self._what(operation, key)
        self._folders.verify()
        try:
            yield
        except BackendError:
            raise
        except OSError as error:
            if is_missing(error, is_read=operation in ("stat", "read")):
                self._folders.verify()
                raise KeyNotFoundError(f"{what}: there is no such object") from error
            if isinstance(error, NotADirectoryError):
                raise AccessDeniedError(
                    f"{what}: a file is in place of a folder above it; move the file away"
                ) from error
            raise backend_error(error, what) from error

    def _read_cached(self, file: int, view: memoryview, offset: int) -> int:
        if self._medium.cache_never_waits:
            return read_without_waiting(file, view, offset)
        return read_whole(file, view, offset, block_bytes=0)

    def _in_page_cache(
        self, file: int, status: os.stat_result, offset: int, size_bytes: int
    ) -> bool:
        if self._read_only or size_bytes < DIRECT_BYTES_MIN:
            return False
        # For other users the kernel reports every page as resident.
        is_own = os.geteuid() in (0, status.st_uid)
        return is_own and is_cached(file, offset, size_bytes)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        parent, _, leaf = key.rpartition("/")
        with self._folders.opened(parent) as folder:
            file = os.open(leaf, _READ_FLAGS, dir_fd=folder)
        try:
            status = os.fstat(file)
            self._check_regular(status, key)
            yield file, status
        finally:
            os.close(file)

    def _unlink_all(self, folder: int, keys: Sequence[str]) -> bool:
        """Delete files of one folder, durably; return whether one existed."""
        removed = False
        try:
            for key in keys:
                with suppress(KeyNotFoundError):
                    self._unlink(folder, key)
                    removed = True
        finally:
            # After a failure too: a retry does not find the files that were deleted before it, and syncs nothing.
            if removed:
                state = "what was removed may be back after a power cut"
                self._folders.sync(folder, state=state)
        return removed

    def _unlink(self, folder: int, key: str) -> None:
        leaf = key.rpartition("/")[2]
        with self._lookup("delete", key):
            status = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                raise KeyNotFoundError(f"{key!r} in {self.place} is a folder, which is no object")
            self._check_regular(status, key)
            os.unlink(leaf, dir_fd=folder)

    def _check_regular(self, status: os.stat_result, key: str) -> None:
        if stat.S_ISREG(status.st_mode):
            return
        if stat.S_ISDIR(status.st_mode):  # what was to be there may be in it, or beside it
            raise AccessDeniedError(
                f"{key!r} in {self.place} is a folder, and a file is to be there: move it away"
            )
        raise AccessDeniedError(
            f"{key!r} in {self.place} is a symbolic link or a special file, which are not used; put the file itself "
            "there"
        )

    def _entries(self, prefix: str) -> list[Entry]:
        try:
            with self._lookup("list", prefix):
                return self._folders.entries(prefix.rstrip("/"))
        except KeyNotFoundError:
            # The folder does not exist, or was removed since its parent was listed.
            return []

    def _discard(self, prefix: str, names: list[str]) -> int:
        folder, count = prefix.rstrip("/"), 0
        with self._lookup("clean up", prefix), self._folders.opened(folder) as descriptor:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor)
                    count += 1
            self._folders.sync(descriptor, state="what was removed may be back after a power cut")
        self._folders.remove_empty(folder)
        return count


class NoFolderError(UnreachableError):
    """The folder of a tier that is opened read-only is missing: it was never created, or is not mounted."""


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _open_root(path: Path, *, read_only: bool) -> Folders:
    with translated(f"open the tier's folder {path}"):
        if os.path.lexists(path) and not path.is_dir():
            raise BackendError(f"{path} is not a folder; name one, or one that can be made")
        if not read_only:
            make_root(path)
        elif not path.exists():
            raise NoFolderError(
                f"{path} is not there; mount or restore it. The first training creates a new one"
            )
        return Folders(path, read_only=read_only)
