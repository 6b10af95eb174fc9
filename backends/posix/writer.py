"""One unfinished object in a folder: filled under a name that no key has, then published in a fixed order.

The order is the promise: all bytes covered, fsync of the file, close, rename (or link, where the key must be free),
fsync of the folder. A failure on the way kills the writer and removes its file; after a failed fsync the kernel may
have dropped the bytes and forgotten it, so nothing is ever synced twice. It knows no retries and no other objects.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from tierfall.backends.posix import system
from tierfall.backends.posix.folders import Folders
from tierfall.backends.posix.probe import Exclusive, Medium
from tierfall.backends.posix.system import (
    split,
    sync_error,
    translated,
    write_bounced,
    write_whole,
)
from tierfall.backends.toolkit.base import AbortOnExit, Coverage, Extent
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.backends.toolkit.views import BouncePool, address_of, flat
from tierfall.core.types.backend import Publish
from tierfall.core.types.errors import BackendError, KeyExistsError, UnreachableError

_CREATE_TRIES = 16
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class _PosixWriterState(StrEnum):
    OPEN = "open"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixWriterContext:
    """What the writers of one backend share: its folders, its medium, its bounce blocks, the names in use."""

    folders: Folders
    medium: Medium
    pool: BouncePool
    living: set[str]


class PosixWriter(AbortOnExit):
    """Fills one new object; see ``core.types.backend.Writer``."""

    def __init__(
        self, shop: PosixWriterContext, key: str, *, extent: Extent, publish: Publish
    ) -> None:
        self._shop = shop
        self._key = key
        self._parent, _, self._leaf = key.rpartition("/")
        self._extent = extent
        self._publish = publish
        self._lock = threading.Lock()
        self._state = _PosixWriterState.OPEN
        self._busy = 0
        self._coverage = Coverage()
        self._name = unfinished_name()
        self._direct = -1
        self._begun_in = shop.folders.identity
        self._folder, self._file = self._start()
        try:
            self._reserve()
        except BaseException:
            self._die()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        """Write a range. After a retryable error the same range may be written again; any other kills the writer."""
        with self._at_work():
            data = flat(view)
            self._extent.check_range(self._what("write"), offset, data.nbytes)
            try:
                with translated(self._what(f"write {data.nbytes} bytes at {offset} of")):
                    self._put(offset, data)
            except UnreachableError:
                self._shop.folders.verify(
                    self._begun_in
                )  # what went with its mount never comes back
                raise
            with self._lock:
                self._coverage.add(offset, offset + data.nbytes)

    def publish(self) -> None:
        """Make the object visible and durable.

        Where the last step fails, the fsync of the folder, the error says so: the object is visible then, but may not
        survive a power cut; write it anew. After every other failure nothing has changed under the key.
        """
        self._begin_publish()
        try:
            self._shop.folders.verify(self._begun_in)
            self._check_complete()
            self._sync_and_close()
            with translated(self._what("publish")):
                self._make_visible()
        except BaseException:
            self._die()
            raise
        self._finish_publish()

    def abort(self) -> None:
        if self._state is not _PosixWriterState.PUBLISHED:
            self._die()

    def _start(self) -> tuple[int, int]:
        """Open the folder and a new file in it; a folder that is removed as empty in between is made again."""
        folders = self._shop.folders
        self._shop.living.add(self._name)
        try:
            for _ in range(_CREATE_TRIES):
                try:
                    folder = folders.make(self._parent)
                except FileNotFoundError:
                    continue
                try:
                    return folder, os.open(self._name, _CREATE_FLAGS, 0o666, dir_fd=folder)
                except FileNotFoundError:
                    os.close(folder)
                except BaseException:
                    os.close(folder)
                    folders.remove_empty(self._parent)
                    raise
            folders.verify()
            raise UnreachableError(self._what("create") + ": its folder is removed again and again")
        except BaseException:
            self._shop.living.discard(self._name)
            raise

    def _reserve(self) -> None:
        length = self._extent.length
        if length:
            with translated(self._what(f"reserve {length} bytes for")):
                system.fallocate(self._file, length)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
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
            if fatal or self._state is _PosixWriterState.DEAD:
                self._die()

    def _put(self, offset: int, data: memoryview) -> None:
        block_bytes = self._shop.medium.direct_bytes
        middle = split(offset, data.nbytes, block_bytes)
        if middle is None:
            write_whole(self._file, data, offset)
            return
        write_whole(self._file, data[: middle.start], offset)
        whole, start = data[middle.start : middle.end], offset + middle.start
        direct = self._open_direct()
        if address_of(whole) % block_bytes == 0:
            write_whole(direct, whole, start, block_bytes=block_bytes)
        else:
            pool = self._shop.pool
            write_bounced(direct, whole, start, block_bytes=block_bytes, pool=pool)
        write_whole(self._file, data[middle.end :], offset + middle.end)

    def _open_direct(self) -> int:
        with self._lock:
            if self._direct < 0:
                flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW
                self._direct = os.open(self._name, flags, dir_fd=self._folder)
            return self._direct

    def _check_open(self, operation: str) -> None:
        if self._state is not _PosixWriterState.OPEN:
            raise BackendError(
                f"{self._what(operation)}: this writer is {self._state}; create a new one"
            )

    def _begin_publish(self) -> None:
        with self._lock:
            self._check_open("publish")
            self._state = _PosixWriterState.PUBLISHING
            busy = self._busy
        if busy:
            self._die()
            raise BackendError(
                f"{self._what('publish')}: {busy} writes are still going on; wait for them first"
            )

    def _check_complete(self) -> None:
        fault = self._coverage.missing(self._extent.length)
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
        if self._publish is Publish.REPLACE:
            os.replace(self._name, self._leaf, src_dir_fd=folder, dst_dir_fd=folder)
        elif self._shop.medium.exclusive is Exclusive.LINK:
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
            # A network file system may send the call twice and see its own link the second time.
            if not self._is_ours(self._leaf):
                raise KeyExistsError(f"{self._what('publish')}: the key is taken") from error
        os.unlink(self._name, dir_fd=folder)

    def _is_ours(self, leaf: str) -> bool:
        ours = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        theirs = os.stat(leaf, dir_fd=self._folder, follow_symlinks=False)
        return os.path.samestat(ours, theirs)

    def _finish_publish(self) -> None:
        state = f"{self._key!r} is visible, but may not survive a power cut: write it anew"
        try:
            self._shop.folders.sync(self._folder, state=state)
        finally:
            self._state = _PosixWriterState.PUBLISHED
            self._shop.living.discard(self._name)
            folder, self._folder = self._folder, -1
            os.close(folder)

    def _die(self) -> None:
        """Remove the file at once, and close it when no write uses it any more: a number closed too early would lead
        a late write into somebody else's file."""
        with self._lock:
            if self._state is not _PosixWriterState.DEAD:
                self._state = _PosixWriterState.DEAD
                # Gone already, or the medium fails: then discard_unfinished finds it; the first error is what counts.
                with suppress(OSError):
                    os.unlink(self._name, dir_fd=self._folder)
                self._shop.living.discard(self._name)
            if self._folder < 0 or self._busy:
                return
            folder, self._folder = self._folder, -1
        os.close(folder)
        with suppress(OSError):
            self._close_files()
        with suppress(OSError):
            self._close_files()
        self._shop.folders.remove_empty(self._parent)

    def _close_files(self) -> None:
        while self._direct >= 0 or self._file >= 0:
            if self._direct >= 0:
                descriptor, self._direct = self._direct, -1
            else:
                descriptor, self._file = self._file, -1
            os.close(descriptor)

    def _what(self, operation: str) -> str:
        return f"{operation} {self._key!r} in {self._shop.folders.path}"
