"""A backend of files below one folder: local disks and mounted file systems.

A key is a path below the root. An unfinished object is a file in the folder of its key, under a name that no key has.
Folders are created with their first object and removed with their last. Symbolic links are followed up to the root,
never below it. Wrappers retry and throttle.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierfall.backends.posix import system
from tierfall.backends.posix.folders import Entry, Folders, is_missing, make_root, walk
from tierfall.backends.posix.system import (
    BOUNCE_BYTES,
    DIRECT_BYTES_MIN,
    UNPROBED,
    Exclusive,
    backend_error,
    direct_block,
    is_cached,
    probe,
    read_whole,
    read_without_waiting,
    split,
    sync_error,
    translated,
    write_bounced,
    write_whole,
)
from tierfall.backends.toolkit.base import BackendBase, Coverage, Extent, WriterBase, WriterState
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_key,
    is_unfinished,
    is_unfinished_of,
    unfinished_name,
)
from tierfall.backends.toolkit.views import BouncePool, address_of, flat
from tierfall.core.types.backend import Publish, StoredObject, Traits
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    KeyExistsError,
    KeyNotFoundError,
    UnreachableError,
)

# O_NONBLOCK: opening a FIFO would block. It has no effect on files.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_MAX_PARALLEL = 4
_CREATE_TRIES = 16

logger = logging.getLogger("tierfall")


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
        self.folders = _open_root(self._path, read_only=read_only)
        try:
            with self.folders.opened("") as folder:
                self.medium = (
                    UNPROBED if read_only else probe(folder, self.place, direct_io=direct_io)
                )
        except BaseException:
            self.folders.close()
            raise
        block_bytes = self.medium.direct_bytes
        self.pool = BouncePool(
            block_bytes=BOUNCE_BYTES, alignment_bytes=max(block_bytes, 1), keep=_MAX_PARALLEL
        )
        self.active: set[str] = set()
        """The file names of active writers."""
        self._traits = Traits(
            durable=self.folders.can_sync,
            atomic_replace=True,
            conditional_create=self.medium.exclusive is not Exclusive.NONE,
            alignment_bytes=max(block_bytes, 1),
            direct_io=block_bytes > 0,
            max_parallel=_MAX_PARALLEL,
            needs_sync=self.folders.can_sync and not read_only,
            cache_never_waits=self.medium.cache_never_waits,
        )

    def _create(self, key: str, extent: Extent, publish: Publish) -> PosixWriter:
        self.folders.verify()
        with translated(self._what("create", key)):
            return PosixWriter(self, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        if offset < 0:
            raise BackendError(f"{self._what('read', key)}: the offset {offset} is negative")
        with self._lookup("read", key), self._opened(key) as (file, _):
            block_bytes = direct_block(file) if self._ask_kernel else self.medium.direct_bytes
            if read_whole(file, data, offset, block_bytes=block_bytes) < data.nbytes:
                end, length = offset + data.nbytes, os.fstat(file).st_size
                raise self._short_read(self._what("read", key), offset, end, length)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """See ``Backend``. False where the backend is read-only: inspection reads the medium."""
        check_key(key)
        if self._read_only:
            return False
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
        with self._lookup("stat", key), self.folders.opened(parent) as folder:
            status = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
            self._check_regular(status, key)
        return StoredObject(key=key, bytes=status.st_size)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        return (
            StoredObject(key=key, bytes=entry.bytes, version=entry.version)
            for key, entry in walk(self._entries, prefix)
            if not entry.is_folder and is_key(key)
        )

    def names(self, folder: str) -> list[str]:
        """Return all names in a folder, also those that ``scan`` leaves out, such as symbolic links."""
        with (
            suppress(KeyNotFoundError),
            self._lookup("list", check_key(folder)),
            self.folders.opened(folder) as descriptor,
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
            with self._lookup("delete", keys[0]), self.folders.opened(parent) as folder:
                removed = self._unlink_all(folder, selected)
            if removed:
                self.folders.remove_empty(parent)
        return [key for key in keys if _folder_of(key) != parent]

    def sync(self, folder: str) -> None:
        """See ``SyncedBackend``. The folders above are durable: a writer syncs them before it publishes."""
        check_key(folder)
        self._check_writable(self._what("sync", folder))
        with self._lookup("sync", folder), self.folders.opened(folder) as descriptor:
            state = f"what is visible in {folder!r} may not survive a power cut: write it anew"
            self.folders.sync(descriptor, state=state)

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        self._check_writable(self._what("clean up", prefix))
        found = list(walk(self._entries, prefix))
        dead: dict[str, list[str]] = {}
        for path, entry in found:
            unfinished = not entry.is_folder and is_unfinished(entry.name)
            if unfinished and entry.name not in self.active:
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
                self.folders.remove_empty(path)
        if not found:
            self.folders.remove_empty(prefix.rstrip("/"))
        return count

    def set_identity_check(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """After the root is mounted anew, continue if ``is_same`` accepts the bytes of its object ``key``."""
        self.folders.set_identity_check(check_key(key), is_same)

    def close(self) -> None:
        """Close the root. Open writers may still abort, but not publish."""
        self.folders.close()

    @contextmanager
    def _lookup(self, operation: str, key: str) -> Iterator[None]:
        """Raise the OSErrors of the block as BackendErrors. KeyNotFoundError only while the root is the folder that was
        opened: an unmounted root has no files either.
        """
        what = self._what(operation, key)
        self.folders.verify()
        try:
            yield
        except BackendError:
            raise
        except OSError as error:
            if is_missing(error, is_read=operation in ("stat", "read")):
                self.folders.verify()
                raise KeyNotFoundError(f"{what}: there is no such object") from error
            if isinstance(error, NotADirectoryError):
                raise AccessDeniedError(
                    f"{what}: a file is in place of a folder above it; move the file away"
                ) from error
            raise backend_error(error, what) from error

    def _read_cached(self, file: int, view: memoryview, offset: int) -> int:
        if self.medium.cache_never_waits:
            return read_without_waiting(file, view, offset)
        return read_whole(file, view, offset, block_bytes=0)

    def _in_page_cache(
        self, file: int, status: os.stat_result, offset: int, size_bytes: int
    ) -> bool:
        if size_bytes < DIRECT_BYTES_MIN:
            return False
        # For other users the kernel reports every page as resident.
        is_own = os.geteuid() in (0, status.st_uid)
        return is_own and is_cached(file, offset, size_bytes)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        parent, _, leaf = key.rpartition("/")
        with self.folders.opened(parent) as folder:
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
                self.folders.sync(folder, state=state)
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
                return self.folders.entries(prefix.rstrip("/"))
        except KeyNotFoundError:
            # The folder does not exist, or was removed since its parent was listed.
            return []

    def _discard(self, prefix: str, names: list[str]) -> int:
        folder, count = prefix.rstrip("/"), 0
        with self._lookup("clean up", prefix), self.folders.opened(folder) as descriptor:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor)
                    count += 1
            self.folders.sync(descriptor, state="what was removed may be back after a power cut")
        self.folders.remove_empty(folder)
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


class PosixWriter(WriterBase):
    """Writes one new object, as a file under a name that no key has; see ``core.types.backend.Writer``.

    The order of ``publish`` makes the object durable: all bytes covered, fsync of the file, close, rename (or link, if
    the key must be free), fsync of the folder. After a failure the writer is dead and its file removed. Nothing is
    synced twice: after a failed fsync the kernel may have dropped the bytes, and report success.

    If the last step of ``publish``, the fsync of the folder, fails, the error says so: the object is visible,
    but may not survive a power cut; write it anew. After every other failure the key is unchanged.
    """

    _publishes_once = True

    def __init__(
        self, backend: PosixBackend, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(key, str(backend.folders.path), extent=extent, publish=publish)
        self._backend = backend
        self._parent, _, self._leaf = key.rpartition("/")
        self._busy = 0
        """Writes in progress."""
        self._coverage = Coverage()
        self._name = unfinished_name(self._leaf, exclusive=publish is Publish.IF_ABSENT)
        self._resumed = False
        self._direct = -1
        self._begun_in = backend.folders.identity
        self._folder, self._file = self._start()
        try:
            if extent.length:
                with translated(self._what(f"reserve {extent.length} bytes for")):
                    system.fallocate(self._file, extent.length)
        except BaseException:
            self._die()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        """Write a range. After a retryable error the range may be written again; after another the writer is dead."""
        with self._writing():
            data = flat(view)
            self._extent.check_range(self._what("write"), offset, data.nbytes)
            try:
                with translated(self._what(f"write {data.nbytes} bytes at {offset} of")):
                    if not (self._resumed and self._has(offset, data)):
                        self._put(offset, data)
            except UnreachableError:
                # If the root was mounted anew, this file is lost: LostWriteError.
                self._backend.folders.verify(self._begun_in)
                raise
            with self._lock:
                self._coverage.add(offset, offset + data.nbytes)

    def find(self, offset: int, view: memoryview) -> bool:
        """See ``Writer``. Read from the medium, as ``_has`` does."""
        if not self._resumed:
            return False
        data = flat(view, writable=True)
        with self._writing():
            try:
                with self._left() as file:
                    direct_bytes = self._backend.medium.direct_bytes
                    return read_whole(file, data, offset, block_bytes=direct_bytes) == data.nbytes
            except OSError:  # it is written over
                return False

    def abort(self) -> None:
        """See ``Writer``. A ``publish`` that is in progress on another thread, such as a hung one, then fails."""
        if self._state is not WriterState.PUBLISHED:
            is_begun = self._coverage.end > 0
            self._die(keep=self._publish_mode is Publish.RESUME and is_begun)

    def _start(self) -> tuple[int, int]:
        """Open the folder and a new file in it; a folder that is removed as empty in between is created again."""
        folders = self._backend.folders
        self._backend.active.add(self._name)
        try:
            for _ in range(_CREATE_TRIES):
                try:
                    folder = folders.make(self._parent)
                except FileNotFoundError:
                    continue
                try:
                    return folder, self._open_file(folder)
                except FileNotFoundError:
                    os.close(folder)
                except BaseException:
                    os.close(folder)
                    folders.remove_empty(self._parent)
                    raise
            folders.verify()
            raise UnreachableError(self._what("create") + ": its folder is removed again and again")
        except BaseException:
            self._backend.active.discard(self._name)
            raise

    def _open_file(self, folder: int) -> int:
        if self._publish_mode is Publish.RESUME:
            names = [n for n in os.listdir(folder) if is_unfinished_of(n, self._leaf)]
            for name in set(names) - self._backend.active:
                if (left := self._lock_left(folder, name)) is not None:
                    self._backend.active.discard(self._name)
                    self._backend.active.add(name)
                    self._name, self._resumed = name, True
                    return left
        file = os.open(self._name, _NEW_FILE, 0o666, dir_fd=folder)
        with suppress(OSError):  # then nobody takes this file for that of a dead process
            # waits for whoever has just looked whether it is one
            fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _lock_left(self, folder: int, name: str) -> int | None:
        """Open an unfinished file of this key that nobody writes any more; None if a living writer has its lock, or it
        cannot be continued."""
        most = self._extent.most_bytes or 0
        try:
            file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and 0 < found.st_size <= most:
                return file
        except OSError:
            logger.debug("%s: %s is not continued", self._place, name, exc_info=True)
        os.close(file)
        return None

    def _has(self, offset: int, data: memoryview) -> bool:
        """Return whether the file has these bytes. They are read from the medium, if the kernel can: after a failed
        fsync of the dead process, its cache may have what the medium has not."""
        with self._left() as file, self._backend.pool.block() as block:
            for start in range(0, data.nbytes, block.nbytes):
                part = data[start : start + block.nbytes]
                there, at = block[: part.nbytes], offset + start
                direct_bytes = self._backend.medium.direct_bytes
                count = read_whole(file, there, at, block_bytes=direct_bytes)
                if count < part.nbytes or there != part:
                    return False
        return True

    @contextmanager
    def _left(self) -> Iterator[int]:
        file = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Count a write in progress; the writer is dead after an error that is not retryable."""
        with self._lock:
            self._check_open("write")
            self._busy += 1
        fatal = True
        try:
            yield
            fatal = False
        except BackendError as error:
            fatal = not error.retryable
            raise
        finally:
            with self._lock:
                self._busy -= 1
            if fatal or self._state is WriterState.DEAD:
                self._die()

    def _put(self, offset: int, data: memoryview) -> None:
        block_bytes = self._backend.medium.direct_bytes
        middle = split(offset, data.nbytes, block_bytes)
        if middle is None:
            write_whole(self._file, data, offset)
            return
        write_whole(self._file, data[: middle.start], offset)
        whole, start = data[middle], offset + middle.start
        direct = self._open_direct()
        if address_of(whole) % block_bytes == 0:
            write_whole(direct, whole, start, block_bytes=block_bytes)
        else:
            pool = self._backend.pool
            write_bounced(direct, whole, start, block_bytes=block_bytes, pool=pool)
        write_whole(self._file, data[middle.stop :], offset + middle.stop)

    def _open_direct(self) -> int:
        with self._lock:
            if self._direct < 0:
                flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW
                self._direct = os.open(self._name, flags, dir_fd=self._folder)
            return self._direct

    def _finish(self, what: str) -> None:
        if self._busy:
            raise BackendError(
                f"{what}: {self._busy} writes are still going on; wait for them first"
            )
        self._backend.folders.verify(self._begun_in)
        with translated(what):
            self._check_complete()
        self._sync_and_close()
        with translated(what):
            self._make_visible()

    def _check_complete(self) -> None:
        fault = self._coverage.missing(self._extent.length)
        if self._resumed:  # packed anew, an image may be shorter
            os.ftruncate(self._file, self._coverage.end)
        size_bytes = os.fstat(self._file).st_size
        if fault is None and size_bytes != self._coverage.end:
            fault = f"{self._coverage.end} bytes were written, the file has {size_bytes}"
        if fault:
            raise BackendError(
                f"{self._what('publish')}: {fault}; write every byte once, then publish"
            )

    def _sync_and_close(self) -> None:
        try:
            os.fsync(self._file)
            self._close_files()
        except OSError as error:
            state = "the bytes count as lost, write the object anew"
            raise sync_error(error, self._what("fsync"), state) from error

    def _make_visible(self) -> None:
        folder = self._folder
        if self._publish_mode is not Publish.IF_ABSENT:
            os.replace(self._name, self._leaf, src_dir_fd=folder, dst_dir_fd=folder)
        elif self._backend.medium.exclusive is Exclusive.LINK:
            self._link()
        elif not system.rename_if_absent(folder, self._name, self._leaf):
            raise BackendError(
                f"{self._what('publish')}: this folder's file system cannot create conditionally"
            )

    def _link(self) -> None:
        folder = self._folder
        try:
            os.link(
                self._name, self._leaf, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
            )
        except FileExistsError as error:
            # A network file system may repeat the call and find its own link.
            if not self._is_ours(self._leaf):
                raise KeyExistsError(f"{self._what('publish')}: the key is taken") from error
        os.unlink(self._name, dir_fd=folder)

    def _is_ours(self, leaf: str) -> bool:
        ours = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        theirs = os.stat(leaf, dir_fd=self._folder, follow_symlinks=False)
        return os.path.samestat(ours, theirs)

    def _on_published(self) -> None:
        state = f"{self._key!r} is visible, but may not survive a power cut: write it anew"
        try:
            self._backend.folders.sync(self._folder, state=state)
        finally:
            self._backend.active.discard(self._name)
            folder, self._folder = self._folder, -1
            os.close(folder)

    def _die(self, *, keep: bool = False) -> None:
        """Remove the file now (``keep``: leave it to be resumed), and close it after the last write in progress: if its
        descriptor were closed earlier, a write could reach another file of the same number."""
        with self._lock:
            if self._state is not WriterState.DEAD:
                self._state = WriterState.DEAD
                if not keep:
                    # A failure here must not hide the first error; discard_unfinished removes the file later.
                    with suppress(OSError):
                        os.unlink(self._name, dir_fd=self._folder)
                self._backend.active.discard(self._name)
            if self._folder < 0 or self._busy:
                return
            folder, self._folder = self._folder, -1
        os.close(folder)
        for _ in range(2):  # the second closes what the first left behind an error
            with suppress(OSError):
                self._close_files()
        self._backend.folders.remove_empty(self._parent)

    def _close_files(self) -> None:
        while self._direct >= 0 or self._file >= 0:
            if self._direct >= 0:
                descriptor, self._direct = self._direct, -1
            else:
                descriptor, self._file = self._file, -1
            os.close(descriptor)
