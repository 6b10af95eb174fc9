"""Objects as files below one folder: local disks and mounted file systems.

A key is a path below the root. What is unfinished has a name that no key has, beside where it will stand; folders
appear with their first object and go with their last. Symbolic links are followed up to the root, never below it.
Retry, throttling and faults are wrappers' work.
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
    translated,
)
from tierfall.backends.posix.writer import PosixWriter, PosixWriterContext
from tierfall.backends.toolkit.base import Extent
from tierfall.backends.toolkit.keys import (
    check_key,
    check_prefix,
    is_component,
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

# Without waiting: opening a FIFO that somebody put there would hang. It changes nothing for files.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_PARALLEL = 4


class PosixBackend:
    """Stores objects as files below ``root``; see ``core.types.backend.Backend``.

    ``root`` is made where it is missing, and must be a folder that this process may write to. ``direct_io``: None
    takes direct I/O where a probe at open shows that it works, False never, True insists. While it is open, a root
    that is unmounted, deleted or replaced raises UnreachableError, until it is back as ``recognise`` says. Call
    ``close`` when no other call is going on.

    ``read_only``: nothing is made, probed or changed; a root that is not there is UnreachableError (it may not be
    mounted), and writing and deleting are AccessDeniedError. Direct I/O is used for a file where the kernel says that
    it takes it, so the traits promise none.

    What lies in the page cache is read from there, unless it is ``read_only``: whoever only looks asks the medium.

    Raises AccessDeniedError or another BackendError, naming the folder, where it cannot be used.
    """

    def __init__(
        self, root: Path | str, *, direct_io: bool | None = None, read_only: bool = False
    ) -> None:
        self._path = Path(os.path.abspath(root))
        self._read_only = read_only
        self._ask_kernel = read_only and direct_io is not False
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
        self._living: set[str] = set()
        self._shop = PosixWriterContext(
            folders=self._folders, medium=self._medium, pool=pool, living=self._living
        )
        self._traits = Traits(
            durable=self._folders.can_sync,
            atomic_replace=True,
            conditional_create=self._medium.exclusive is not Exclusive.NONE,
            alignment_bytes=max(block_bytes, 1),
            direct_io=block_bytes > 0,
            max_parallel=_MAX_PARALLEL,
            needs_sync=self._folders.can_sync and not read_only,
        )

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def place(self) -> str:
        return str(self._path)

    def create(
        self,
        key: str,
        *,
        length: int | None = None,
        length_max: int | None = None,
        publish: Publish = Publish.REPLACE,
    ) -> PosixWriter:
        check_key(key)
        extent = Extent(length=length, length_max=length_max)
        extent.check(f"create {key!r} in {self.place}")
        if publish is Publish.IF_ABSENT and not self._traits.conditional_create:
            raise BackendError(
                f"create {key!r} in {self.place}: this file system has neither hard links nor an exclusive rename, "
                "so nothing can be created conditionally there"
            )
        self._check_writable("create", key)
        self._folders.verify()
        with translated(f"create {key!r} in {self.place}"):
            return PosixWriter(self._shop, key, extent=extent, publish=publish)

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        check_key(key)
        data = flat(view, writable=True)
        if offset < 0:
            raise BackendError(f"read {key!r} in {self.place}: the offset {offset} is negative")
        with self._asking("read", key), self._opened(key) as (file, status):
            block_bytes = direct_block(file) if self._ask_kernel else self._medium.direct_bytes
            count = read_whole(file, data, offset, block_bytes=block_bytes)
        if count < data.nbytes:
            raise self._too_short(key, offset, data.nbytes, status)

    def read_cached(self, key: str, offset: int, end: int, views: Iterable[memoryview]) -> bool:
        """See ``Backend``. Never for who only looks: that one wants reads of the medium itself."""
        check_key(key)
        with self._asking("read", key), self._opened(key) as (file, status):
            if not self._in_page_cache(file, status, offset, end - offset):
                return False
            for view in views:
                data = flat(view, writable=True)
                if read_whole(file, data, offset, block_bytes=0) < data.nbytes:
                    raise self._too_short(key, offset, data.nbytes, status)
                offset += data.nbytes
        return True

    def _too_short(
        self, key: str, offset: int, wanted: int, status: os.stat_result
    ) -> BackendError:
        return BackendError(
            f"read {key!r} in {self.place}: bytes {offset} to {offset + wanted} were asked for, but it ends at "
            f"{status.st_size}; it was cut short, or another object was expected"
        )

    def stat(self, key: str) -> StoredObject:
        check_key(key)
        parent, _, leaf = key.rpartition("/")
        with self._asking("stat", key), self._folders.opened(parent) as folder:
            status = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
            self._check_regular(status, key)
        return StoredObject(key=key, bytes=status.st_size)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        return self._scan(prefix)

    def links(self, folder: str) -> list[str]:
        """Name the symbolic links in a folder, which ``scan`` leaves out and nothing follows."""
        with suppress(KeyNotFoundError), self._asking("list", check_key(folder)):
            return self._folders.links(folder)
        return []

    def delete(self, key: str) -> None:
        self.delete_some([key])

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """See ``Backend``. What lies in the folder of the first key goes, and the folder is synced once."""
        keys = [check_key(key) for key in keys]
        self._check_writable("delete", keys[0])
        parent = _folder_of(keys[0])
        going = [key for key in keys if _folder_of(key) == parent]
        # Asked and answered: where the folder is not there, there is nothing to remove, here or any more.
        with suppress(KeyNotFoundError):
            with self._asking("delete", keys[0]), self._folders.opened(parent) as folder:
                removed = self._unlink_all(folder, going)
            if removed:
                self._folders.remove_empty(parent)
        return [key for key in keys if _folder_of(key) != parent]

    def sync(self, folder: str) -> None:
        """See ``SyncedBackend``. The way to the folder is durable: whoever published in it saw to that first."""
        check_key(folder)
        self._check_writable("sync", folder)
        with self._asking("sync", folder), self._folders.opened(folder) as descriptor:
            state = f"what is visible in {folder!r} may not survive a power cut: write it anew"
            self._folders.sync(descriptor, state=state)

    def discard_unfinished(self, prefix: str) -> int:
        check_prefix(prefix)
        self._check_writable("clean up", prefix)
        count, pending = 0, [prefix]
        empty: list[str] = []
        listings = Listings(self._entries)
        while pending:
            folders = pending[-listings.at_once :]
            del pending[-listings.at_once :]
            for folder, entries in zip(folders, listings.list(folders), strict=True):
                if not entries:
                    empty.append(folder.rstrip("/"))
                pending += [
                    f"{folder}{each.name}/"
                    for each in entries
                    if each.is_folder and is_component(each.name)
                ]
                dead = [each.name for each in entries if self._is_dead(each)]
                if dead:
                    # A folder that somebody removes meanwhile took what was dead in it along.
                    with suppress(KeyNotFoundError):
                        count += self._discard(folder, dead)
        for name in empty:
            # A kill between the last file's end and its folder's leaves the folder.
            self._folders.remove_empty(name)
        return count

    def recognise(self, key: str, is_same: Callable[[bytes], bool]) -> None:
        """Go on where the root is mounted anew, if the object ``key`` there says that it is the same."""
        self._folders.recognise(check_key(key), is_same)

    def close(self) -> None:
        """Give the root back. Writers that are still open may go on to their abort, not to their publish."""
        self._folders.close()

    @contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[None]:
        """Translate what goes wrong while something that should be there is looked up.

        "Not there" is believed only while the root is the one that was opened.
        """
        what = f"{operation} {key!r} in {self.place}"
        self._folders.verify()
        try:
            yield
        except BackendError:
            raise
        except OSError as error:
            if is_missing(error):
                self._folders.verify()
                raise KeyNotFoundError(f"{what}: there is no such object") from error
            raise backend_error(error, what) from error

    def _in_page_cache(
        self, file: int, status: os.stat_result, offset: int, size_bytes: int
    ) -> bool:
        if self._read_only or size_bytes < DIRECT_BYTES_MIN:
            return False
        # The kernel tells nobody else: then all pages seem to be there.
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
        """Remove files of one folder, durably; say whether one was there."""
        removed = False
        try:
            for key in keys:
                with suppress(KeyNotFoundError):
                    self._unlink(folder, key)
                    removed = True
        finally:
            # Where one cannot be removed as well: whoever asks again does not find those that went before it.
            if removed:
                state = "what was removed may be back after a power cut"
                self._folders.sync(folder, state=state)
        return removed

    def _unlink(self, folder: int, key: str) -> None:
        leaf = key.rpartition("/")[2]
        with self._asking("delete", key):
            self._check_regular(os.stat(leaf, dir_fd=folder, follow_symlinks=False), key)
            os.unlink(leaf, dir_fd=folder)

    def _check_writable(self, operation: str, key: str) -> None:
        if self._read_only:
            raise AccessDeniedError(
                f"{operation} {key!r} in {self.place}: it was opened for reading only; open it for writing"
            )

    def _check_regular(self, status: os.stat_result, key: str) -> None:
        if stat.S_ISREG(status.st_mode):
            return
        if stat.S_ISDIR(status.st_mode):
            raise KeyNotFoundError(f"{key!r} in {self.place} is a folder; there is no such object")
        raise AccessDeniedError(
            f"{key!r} in {self.place} is a symbolic link or a special file, and such are left alone; put the file "
            "itself there"
        )

    def _scan(self, prefix: str) -> Iterator[StoredObject]:
        listings = Listings(self._entries)
        pending: list[StoredObject | str] = [prefix]
        while pending:
            item = pending.pop()
            if isinstance(item, StoredObject):
                yield item
                continue
            pending.append(item)
            group = _next_folders(pending, listings.at_once)
            prefixes = [item for item in group if isinstance(item, str)]
            rows = dict(zip(prefixes, listings.list(prefixes), strict=True))
            for item in reversed(group):
                if isinstance(item, str):
                    pending.extend(reversed(_below(item, rows[item])))
                else:
                    pending.append(item)

    def _is_dead(self, entry: Entry) -> bool:
        return not entry.is_folder and is_unfinished(entry.name) and entry.name not in self._living

    def _entries(self, prefix: str) -> list[Entry]:
        try:
            with self._asking("list", prefix):
                return self._folders.entries(prefix.rstrip("/"))
        except KeyNotFoundError:
            # Not there, or removed since its parent was listed: nothing lies below it.
            return []

    def _discard(self, prefix: str, names: list[str]) -> int:
        folder, count = prefix.rstrip("/"), 0
        with self._asking("clean up", prefix), self._folders.opened(folder) as descriptor:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor)
                    count += 1
            self._folders.sync(descriptor, state="what was removed may be back after a power cut")
        self._folders.remove_empty(folder)
        return count


def _next_folders(pending: list[StoredObject | str], count: int) -> list[StoredObject | str]:
    """Take from the end of ``pending`` up to so many folders, and the objects between them, in their order."""
    group: list[StoredObject | str] = []
    while pending and count:
        group.append(pending.pop())
        count -= isinstance(group[-1], str)
    return group


def _below(prefix: str, entries: Iterable[Entry]) -> list[StoredObject | str]:
    """Name what lies in a folder as objects and longer prefixes, in the order of the keys that they stand for."""
    found: dict[str, StoredObject | str] = {}
    for entry in entries:
        key = prefix + entry.name
        if not is_key(key):
            continue
        if entry.is_folder:
            found[key + "/"] = key + "/"
        else:
            found[key] = StoredObject(key=key, bytes=entry.bytes, version=entry.version)
    return [found[name] for name in sorted(found)]


class NoFolderError(UnreachableError):
    """A tier's folder is not there, and is to be read only: it was never made, or its file system is not mounted."""


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _open_root(path: Path, *, read_only: bool) -> Folders:
    with translated(f"open the tier's folder {path}"):
        if os.path.lexists(path) and not path.is_dir():
            raise BackendError(f"{path} is not a folder; name one, or one that can be made")
        if not read_only:
            make_root(path)
        elif not path.exists():
            raise NoFolderError(f"{path} is not there; mount or restore it")
        return Folders(path, read_only=read_only)
