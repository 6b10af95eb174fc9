"""A writer of one object in a folder: it writes a file under a name that no key has, and publishes it.

The order of publish makes the object durable: all bytes covered, fsync of the file, close, rename (or link, where the
key must be free), fsync of the folder. After a failure the writer is dead and its file removed. Nothing is synced
twice, because after a failed fsync the kernel may have dropped the bytes and report success.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tierfall.backends.posix import system
from tierfall.backends.posix.folders import Folders
from tierfall.backends.posix.probe import Exclusive, Medium
from tierfall.backends.posix.system import (
    read_whole,
    split,
    sync_error,
    translated,
    write_bounced,
    write_whole,
)
from tierfall.backends.toolkit.base import Coverage, Extent, WriterBase, WriterState
from tierfall.backends.toolkit.keys import is_unfinished_of, unfinished_name
from tierfall.backends.toolkit.views import BouncePool, address_of, flat
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError, KeyExistsError, UnreachableError

logger = logging.getLogger("tierfall")

_CREATE_TRIES = 16
NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixWriterContext:
    """What the writers of one backend share. ``active`` are the file names of active writers."""

    folders: Folders
    medium: Medium
    pool: BouncePool
    active: set[str]


class PosixWriter(WriterBase):
    """Writes one new object; see ``core.types.backend.Writer``.

    If the last step of ``publish``, the fsync of the folder, fails, the error says so: the object is visible,
    but may not survive a power cut; write it anew. After every other failure the key is unchanged.
    """

    _publishes_once = True

    def __init__(
        self, context: PosixWriterContext, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        super().__init__(key, str(context.folders.path), extent=extent, publish=publish)
        self._context = context
        self._parent, _, self._leaf = key.rpartition("/")
        self._busy = 0
        """Writes in progress."""
        self._coverage = Coverage()
        self._name = unfinished_name(self._leaf)
        self._resumed = False
        self._direct = -1
        self._begun_in = context.folders.identity
        self._folder, self._file = self._start()
        try:
            self._reserve()
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
                self._context.folders.verify(self._begun_in)
                raise
            with self._lock:
                self._coverage.add(offset, offset + data.nbytes)

    def abort(self) -> None:
        """See ``Writer``. A ``publish`` that is in progress on another thread, such as a hung one, then fails."""
        if self._state is not WriterState.PUBLISHED:
            is_begun = self._coverage.end > 0
            self._die(keep=self._publish_mode is Publish.RESUME and is_begun)

    def _start(self) -> tuple[int, int]:
        """Open the folder and a new file in it; a folder that is removed as empty in between is created again."""
        folders = self._context.folders
        self._context.active.add(self._name)
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
            self._context.active.discard(self._name)
            raise

    def _open_file(self, folder: int) -> int:
        if self._publish_mode is Publish.RESUME:
            names = [n for n in os.listdir(folder) if is_unfinished_of(n, self._leaf)]
            for name in set(names) - self._context.active:
                if (left := self._lock_left(folder, name)) is not None:
                    self._context.active.discard(self._name)
                    self._context.active.add(name)
                    self._name, self._resumed = name, True
                    return left
        file = os.open(self._name, os.O_WRONLY | NEW_FILE, 0o666, dir_fd=folder)
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
        file = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
        try:
            with self._context.pool.block() as block:
                for start in range(0, data.nbytes, block.nbytes):
                    part = data[start : start + block.nbytes]
                    there, at = block[: part.nbytes], offset + start
                    direct_bytes = self._context.medium.direct_bytes
                    count = read_whole(file, there, at, block_bytes=direct_bytes)
                    if count < part.nbytes or there != part:
                        return False
        finally:
            os.close(file)
        return True

    def _reserve(self) -> None:
        length = self._extent.length
        if length:
            with translated(self._what(f"reserve {length} bytes for")):
                system.fallocate(self._file, length)

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
        block_bytes = self._context.medium.direct_bytes
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
            pool = self._context.pool
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
        self._context.folders.verify(self._begun_in)
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
        elif self._context.medium.exclusive is Exclusive.LINK:
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
            self._context.folders.sync(self._folder, state=state)
        finally:
            self._context.active.discard(self._name)
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
                self._context.active.discard(self._name)
            if self._folder < 0 or self._busy:
                return
            folder, self._folder = self._folder, -1
        os.close(folder)
        with suppress(OSError):
            self._close_files()
        with suppress(OSError):
            self._close_files()
        self._context.folders.remove_empty(self._parent)

    def _close_files(self) -> None:
        while self._direct >= 0 or self._file >= 0:
            if self._direct >= 0:
                descriptor, self._direct = self._direct, -1
            else:
                descriptor, self._file = self._file, -1
            os.close(descriptor)
