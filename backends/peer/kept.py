"""The objects that a node keeps in its memory for others, received straight into the pages of their files.

New pages cost more than the transfer of the bytes: the kernel zeroes each, and enters it in the page table. So a large
object is received into a mapping of its file, which stays after ``publish``. Its file then has a second name, which is
no key. Once the object is deleted, by whichever process of the node, the pages belong to the second name alone, and the
next object takes them over. At most one deleted object's pages stay.

The pages are not reused while another process has the file open, since it would see the bytes change.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierfall.backends.posix.backend import PosixBackend
from tierfall.backends.posix.folders import Folders
from tierfall.backends.posix.system import translated
from tierfall.backends.posix.writer import NEW_FILE, PosixWriter, PosixWriterContext
from tierfall.backends.toolkit.base import Extent
from tierfall.backends.toolkit.keys import unfinished_name
from tierfall.backends.toolkit.mapping import fork_safe_mapping
from tierfall.core.types.backend import Publish

MAPPED_BYTES_MIN = 1 << 20
"""Smaller objects are written as to any folder."""

_all_pages: weakref.WeakSet[FilePages] = weakref.WeakSet()


class FilePages:
    """The pages of one file: the open file, its mapping, and its second name, once it has one, in ``folder``."""

    def __init__(self, file: int, length_bytes: int) -> None:
        self.file = os.dup(file)
        try:
            self._mapping = fork_safe_mapping(self.file, length_bytes)
        except BaseException:
            os.close(self.file)
            raise
        self.view = memoryview(self._mapping)
        self._folder = ""
        self._name = ""
        _all_pages.add(self)

    def add_name(self, folders: Folders, folder: int, leaf: str, top: str) -> None:
        """Link the file ``leaf`` of an open folder to a second name in the folder ``top``. Raises OSError."""
        name = unfinished_name()
        with folders.opened(top) as target:
            os.link(leaf, name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
        self._folder, self._name = top, name

    def move_to(self, folders: Folders, folder: int, name: str) -> None:
        """Rename the second name to ``name`` in an open folder. Raises OSError."""
        with folders.opened(self._folder) as source:
            os.rename(self._name, name, src_dir_fd=source, dst_dir_fd=folder)

    def is_live(self) -> bool:
        """Whether the object is there: its file has both names."""
        return os.fstat(self.file).st_nlink > 1

    def is_reusable(self, folders: Folders) -> bool:
        """Whether the second name is the only one, and no other open file or mapping of any process is left."""
        try:
            with folders.opened(self._folder) as folder:
                found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
        except (
            OSError
        ):  # the name was swept by another process: the one that is left is the object's
            return False
        own = os.fstat(self.file)
        return os.path.samestat(found, own) and own.st_nlink == 1 and _is_open_once(self.file)

    def release(self, folders: Folders) -> None:
        """Remove the second name and close the file; the pages are freed with the last view of them."""
        with suppress(OSError), folders.opened(self._folder) as folder:
            os.unlink(self._name, dir_fd=folder)
        folders.remove_empty(self._folder)
        self.close()

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)
        with suppress(BufferError):  # a thread is still receiving: the mapping ends with its view
            self.view.release()
            self._mapping.close()


class KeptFiles(PosixBackend):
    """Stores objects as files below ``root``, a folder of a file system in memory; see the module."""

    def __init__(self, root: Path | str) -> None:
        super().__init__(root, direct_io=False)
        self._kept: list[FilePages] = []
        """The pages of objects that were received here, and of one at most that was deleted."""
        self._kept_lock = threading.Lock()

    @property
    def spare_bytes(self) -> int:
        """The bytes of memory that the next large object takes over."""
        with self._kept_lock:
            spare = self._release_deleted()
            return 0 if spare is None else os.fstat(spare.file).st_size

    def _create(self, key: str, extent: Extent, publish: Publish) -> PosixWriter:
        if (extent.length or 0) < MAPPED_BYTES_MIN:
            return super()._create(key, extent, publish)
        self._folders.verify()
        spare = self._take_spare()
        try:
            with translated(self._what("create", key)):
                return MappedWriter(
                    self._context, key, extent=extent, publish=publish, spare=spare, keep=self._keep
                )
        except BaseException:
            if spare is not None:
                spare.release(self._folders)
            raise

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        left = super().delete_some(keys)
        with self._kept_lock:
            self._release_deleted()
        return left

    def close(self) -> None:
        with self._kept_lock:
            kept, self._kept = self._kept, []
        for pages in kept:
            pages.release(self._folders)
        super().close()

    def _discard(self, prefix: str, names: list[str]) -> int:
        """A second name is removed, and is no unfinished object: its pages are not used again."""
        seconds = 0
        with self._lookup("clean up", prefix), self._folders.opened(prefix.rstrip("/")) as folder:
            for name in names:
                with suppress(FileNotFoundError):
                    seconds += os.stat(name, dir_fd=folder, follow_symlinks=False).st_nlink > 1
        return super()._discard(prefix, names) - seconds

    def _keep(self, pages: FilePages) -> None:
        with self._kept_lock:
            self._kept.append(pages)

    def _take_spare(self) -> FilePages | None:
        with self._kept_lock:
            spare = self._release_deleted()
            if spare is not None:
                self._kept.remove(spare)
            return spare

    def _release_deleted(self) -> FilePages | None:
        """Release the pages of deleted objects, except those of one that can be reused; return these."""
        spare = None
        for pages in [each for each in self._kept if not each.is_live()]:
            if spare is None and pages.is_reusable(self._folders):
                spare = pages
            else:
                self._kept.remove(pages)
                pages.release(self._folders)
        return spare


class MappedWriter(PosixWriter):
    """Writes an object of a known length through a mapping of its file; ``keep`` is given the pages once it is
    published. ``spare`` are the pages of a deleted object, which it takes over."""

    def __init__(
        self,
        context: PosixWriterContext,
        key: str,
        *,
        extent: Extent,
        publish: Publish,
        spare: FilePages | None,
        keep: Callable[[FilePages], None],
    ) -> None:
        self._pages = spare
        self._keep = keep
        super().__init__(context, key, extent=extent, publish=publish)

    @contextmanager
    def receiving(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Lend the memory of a range, which counts as written if the block ends without an error. Errors are those of
        ``write``."""
        with self._writing():
            self._extent.check_range(self._what("write"), offset, size_bytes)
            assert self._pages is not None
            yield self._pages.view[offset : offset + size_bytes]
            with self._lock:
                self._coverage.add(offset, offset + size_bytes)

    def _open_file(self, folder: int) -> int:
        if self._pages is None:
            return os.open(self._name, os.O_RDWR | NEW_FILE, 0o666, dir_fd=folder)
        self._pages.move_to(self._context.folders, folder, self._name)
        return os.dup(self._pages.file)

    def _reserve(self) -> None:
        """Reserve the object's exact pages before any is touched: a missing one then ends the process."""
        length, spare = self._extent.length or 0, self._pages
        if os.fstat(self._file).st_size < length:
            super()._reserve()
        os.ftruncate(self._file, length)
        if spare is None or spare.view.nbytes < length:
            self._pages = FilePages(self._file, length)
            if spare is not None:
                spare.close()

    def _finish(self, what: str) -> None:
        super()._finish(what)
        assert self._pages is not None
        top = self._key.partition("/")[0] if "/" in self._key else ""
        try:
            self._pages.add_name(self._context.folders, self._folder, self._leaf, top)
        except OSError:  # then the pages are not used again
            self._pages.close()
        else:
            self._keep(self._pages)

    def _die(self, *, keep: bool = False) -> None:
        super()._die(keep=keep)
        if self._pages is not None:
            self._pages.close()


def _is_open_once(file: int) -> bool:
    """Whether no other open file, of any process, leads to the same file: the kernel grants a write lease only then."""
    try:
        # An open before the lease is returned sends this signal, which is ignored by default; SIGIO ends the process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # another has it open, or the file system has no leases
        return False
    return True


def _close_inherited() -> None:
    """A forked child must not hold on to pages that its parent frees."""
    for pages in list(_all_pages):
        pages.close()


os.register_at_fork(after_in_child=_close_inherited)
