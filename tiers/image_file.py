"""Image files: one file in memory for each image, which outlives the process and is used again for later images.

    0        header page:  magic, a word, a sealed document, zeros, the word of peer memory
    2 MiB    the image, padded to 4 KiB; its manifest; its commit record

A *word* has 8 bytes, a number and its complement, and is written by one store. The first one is the length of the
document: 0 means that the file is free. The document has the digests of the records. The word is written after all else
when an image is sealed, and cleared before anything is overwritten: a kill at any moment leaves the file free or
sealed. The second word is 1 once peer memory has committed the checkpoint. Between the header and the image is a hole,
so that large pages may be used. Integers have native byte order: a file never leaves the machine that wrote it.

The process that writes a file has its ``flock``, so that two starts never share one. A forked child has neither the
lock nor access to the memory, and keeps the pages of a removed file until it exits. A mapping ends with the last view
of it. If others remove a file, its memory is unchanged, and ends with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierfall.core.format import documents
from tierfall.core.format.documents import JsonFields
from tierfall.core.format.records import IMAGE_BYTES_MAX
from tierfall.core.runtime import pinned
from tierfall.core.runtime.pinned import PageLock
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    KeyNotFoundError,
    LockError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.values import Shard
from tierfall.tiers.host_folder import WHAT_HELPS, measure_room, sized

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tierfall")

MAGIC = b"tierfall image\n\0"
PAGE_BYTES = 4 << 10
IMAGE_START = 2 << 20
PIECE_BYTES = 64 << 20
"""Bytes that one call locks. It takes a few milliseconds, in which no other thread can launch work on a device."""
TOUCH_BYTES = 8 << 20
RESERVE_BYTES = 256 << 20
LOG_EVERY_S = 2.0
LOCK_TRIES = 20
LOCK_POLL_S = 0.05
# Cleaners of temporary files delete by age, and stores into a mapping do not change a file's times.
TOUCH_EVERY_S = 3600.0

_WORD_BYTES = 8
_WORD_MASK = 0xFFFFFFFF
_DOCUMENT_START = len(MAGIC) + _WORD_BYTES
_PEERS_START = PAGE_BYTES - _WORD_BYTES
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_open_files: weakref.WeakSet[ImageFile] = weakref.WeakSet()


def padded(length_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


def room_for(*, image_bytes: int, records_bytes: int) -> int:
    """Return the room that an image needs in a file, with its manifest and commit record."""
    return padded(image_bytes) + padded(records_bytes)


# The header -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The length of a manifest or a commit record, and its digest."""

    length: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> Record:
        return cls(length=len(data), digest=documents.sha256(data))

    @classmethod
    def read(cls, seal: JsonFields, name: str, what: str) -> Record:
        fields = JsonFields(seal.get(name, dict), f"{what}: {name}")
        length = fields.number("bytes", 0, documents.MAX_DOCUMENT_BYTES)
        return cls(length=length, digest=fields.get("digest", str))

    def members(self) -> dict[str, object]:
        return {"bytes": self.length, "digest": self.digest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What the header says of a sealed image. The manifest begins at the next page after the image, and the commit
    record where the manifest ends."""

    run: str
    shard: Shard
    image_bytes: int
    manifest: Record
    commit: Record

    @property
    def room_bytes(self) -> int:
        records_bytes = self.manifest.length + self.commit.length
        return room_for(image_bytes=self.image_bytes, records_bytes=records_bytes)

    def encode(self) -> bytes:
        return documents.seal(
            {
                "run": self.run,
                "rank": self.shard.rank,
                "world_size": self.shard.world_size,
                "image_bytes": self.image_bytes,
                "manifest": self.manifest.members(),
                "commit": self.commit.members(),
            }
        )


def read_header(page: bytes, *, what: str) -> Seal | None:
    """Return the seal in a header page; None if the file is free.

    Raises ConfigError for another file, IntegrityError for a damaged header, and NotSupportedError for one that a newer
    tierfall wrote.
    """
    if not any(page):  # its creation was interrupted
        return None
    if page[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"{what}: its first bytes are not those of an image in memory")
    length = _read_word(page, len(MAGIC), what)
    if length == 0:
        return None
    end = _DOCUMENT_START + length
    if end > _PEERS_START or any(page[end:_PEERS_START]):
        raise IntegrityError(f"{what}: its header is damaged")
    _read_word(page, _PEERS_START, what)
    what = f"{what}: header"
    fields = JsonFields(documents.open_sealed(page[_DOCUMENT_START:end], what=what), what)
    world_size = fields.number("world_size", 1, 10**9)
    return Seal(
        run=fields.get("run", str),
        shard=Shard(fields.number("rank", 0, world_size - 1), world_size),
        image_bytes=fields.number("image_bytes", 1, IMAGE_BYTES_MAX),
        manifest=Record.read(fields, "manifest", what),
        commit=Record.read(fields, "commit", what),
    )


def _read_word(page: bytes | memoryview, offset: int, what: str) -> int:
    """Return the number in a word; 0 for an empty one."""
    word = int.from_bytes(page[offset : offset + _WORD_BYTES], sys.byteorder)
    number = word & _WORD_MASK
    if word and word >> 32 != number ^ _WORD_MASK:
        raise IntegrityError(f"{what}: the word {word:#018x} in its header is damaged")
    return number


def _publish(view: memoryview, offset: int, number: int) -> None:
    """Write a word, by one store of 8 aligned bytes."""
    word = number and number | (number ^ _WORD_MASK) << 32
    view[offset : offset + _WORD_BYTES].cast("Q")[0] = word


# An image in a file -----------------------------------------------------------------------------------


class Region:
    """One image in a file: it is filled, sealed, perhaps unsealed, and released. Then the file is free for another."""

    def __init__(
        self, file: ImageFile, *, image_bytes: int, shard: Shard, seal: Seal | None = None
    ) -> None:
        self.image_bytes = image_bytes
        self.shard = shard
        self._file = file
        self._seal = seal
        self._released = False
        self._unsealed = False
        self._view = file.view[IMAGE_START : IMAGE_START + file.room_bytes]

    @property
    def image(self) -> memoryview:
        """The image's bytes, at an address that is a multiple of 4096. Writable if the file is."""
        self._require_allocated("reading the image")
        return self._view[: self.image_bytes]

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``start`` of the image. Pages of the mapping that are not touched yet stay so."""
        self._require_allocated("reading the image")
        self._file.read_into(IMAGE_START + start, view)

    @property
    def sealed(self) -> bool:
        return self._seal is not None and not self._released

    @property
    def path(self) -> Path:
        """The path of its file."""
        return self._file.path

    def has_file(self) -> bool:
        """Whether the path still names its file; else the image ends with this process. Raises BackendError."""
        return self._file.exists()

    @property
    def sealed_as(self) -> Seal | None:
        """What the header says of the image; None if it is not sealed."""
        return self._seal

    @property
    def filling(self) -> bool:
        """Whether the image may be written to."""
        return self._seal is None and not self.is_discarded

    @property
    def is_discarded(self) -> bool:
        """Whether the region was unsealed or released."""
        return self._released or self._unsealed

    def seal(self, *, manifest: bytes, commit: bytes) -> None:
        """Write the records and the header: from here on the image survives this process.

        All writes to the image must have ended. Raises CapacityError if the file has no room for the records.
        """
        with self._changing("sealing") as header:
            if self._seal is not None or self._unsealed:
                raise ValueError(f"{self._what}: sealing: it was sealed already")
            start = padded(self.image_bytes)
            if len(manifest) + len(commit) > len(self._view) - start:
                raise CapacityError(
                    f"{self._what}: manifest and commit record are {len(manifest)} + {len(commit)} bytes, room is for "
                    f"{len(self._view) - start}; allocate the region with larger `records_bytes`"
                )
            records = manifest + commit
            self._view[start : start + len(records)] = records
            seal = Seal(
                run=self._file.run,
                shard=self.shard,
                image_bytes=self.image_bytes,
                manifest=Record.of(manifest),
                commit=Record.of(commit),
            )
            document = seal.encode()
            _publish(header, _PEERS_START, 0)
            room = _PEERS_START - _DOCUMENT_START
            header[_DOCUMENT_START:_PEERS_START] = document.ljust(room, b"\0")
            _publish(header, len(MAGIC), len(document))
            self._seal = seal

    def unseal(self) -> None:
        """Remove the seal, by one store: the image does not survive this process any more.

        Its bytes are kept for readers that have a view, until ``release``.
        """
        self._require_seal("unsealing")
        with self._changing("unsealing") as header:
            _publish(header, len(MAGIC), 0)
            self._seal = None
            self._unsealed = True

    def manifest(self) -> bytes:
        """Return the manifest, verified against the seal; raises IntegrityError if it differs."""
        with self._file.guard:
            seal = self._require_seal("reading the manifest")
            return self._verified("manifest", padded(self.image_bytes), seal.manifest)

    def commit(self) -> bytes:
        """Return the commit record, verified against the seal; raises IntegrityError if it differs."""
        with self._file.guard:
            seal = self._require_seal("reading the commit record")
            start = padded(self.image_bytes) + seal.manifest.length
            return self._verified("commit record", start, seal.commit)

    def note_on_peers(self) -> None:
        """Note that peer memory has committed the checkpoint; it survives this process."""
        self._require_seal("noting a commit")
        with self._changing("noting a commit") as header:
            _publish(header, _PEERS_START, 1)

    @property
    def on_peers(self) -> bool:
        """Whether peer memory has committed the checkpoint. Raises IntegrityError if that is damaged."""
        with self._file.guard:
            self._require_seal("reading its header")
            return bool(_read_word(self._file.view, _PEERS_START, self._what))

    def release(self) -> None:
        """Free the file, whose seal is removed before its bytes may change. May be called twice.

        Views of the image stay mapped, but see the bytes that are written there next: readers need a lease.
        """
        with self._file.guard:
            if self._released or self._file.closed:
                return
            with self._changing("releasing") as header:
                if self._seal is not None:
                    _publish(header, len(MAGIC), 0)
                self._released = True
                self._view = memoryview(b"")
                self._file.region = None

    def drop_view(self) -> None:
        """Drop the view of a closed file, so that a reference to this region does not keep its memory mapped."""
        self._view = memoryview(b"")

    @contextlib.contextmanager
    def _changing(self, doing: str) -> Iterator[memoryview]:
        """Lock the file for a change of its header."""
        with self._file.guard:
            self._file.require_writable(doing)
            self._require_allocated(doing)
            yield self._file.view[:PAGE_BYTES]

    @property
    def _what(self) -> str:
        return self._file.what

    def _require_allocated(self, doing: str) -> None:
        if self._released:
            raise ValueError(f"{self._what}: {doing}: its image was released")

    def _require_seal(self, doing: str) -> Seal:
        self._require_allocated(doing)
        if self._seal is None:
            raise ValueError(f"{self._what}: {doing}: it is not sealed yet")
        return self._seal

    def _verified(self, name: str, start: int, record: Record) -> bytes:
        data = bytes(self._view[start : start + record.length])
        if documents.sha256(data) != record.digest:
            raise IntegrityError(
                f"{self._what}: the {name} of its image differs from the digest in its header: this copy is damaged; "
                "restore from another tier"
            )
        return data


# A file -----------------------------------------------------------------------------------------------


class ImageFile:
    """One open file. ``region`` is the image that it is used for, and ``damage`` why its header cannot be read: it is
    free if both are None. ``room_bytes`` are for an image and its records."""

    def __init__(self, path: Path, fd: int, *, run: str, writable: bool) -> None:
        self.path = path
        self.run = run
        self.guard = threading.RLock()
        self.closed = False
        self.region: Region | None = None
        self.damage: TierfallError | None = None
        self.room_bytes = 0
        self.header = b""
        """The header page that was read when the file was opened."""
        self.view = memoryview(b"")
        self._fd = fd
        self._writable = writable
        self._mapping: mmap.mmap | None = None
        self.touched_bytes = 0
        """Bytes of the room whose pages are touched, from its start on."""
        self.locked_bytes = 0
        self._locks: list[PageLock] = []
        _open_files.add(self)

    @classmethod
    def create(
        cls, path: Path, *, run: str, room_bytes: int, stopped: Callable[[], bool] = lambda: False
    ) -> ImageFile:
        """Create a file with room for an image. A kill before this returns leaves a file that is free.

        Raises CapacityError, with the needed and the available bytes, and BackendError if it was ``stopped`` meanwhile.
        Pages are reserved before they are mapped: a full file system is an error here, and no SIGBUS later.
        """
        what = _what(path)
        with _translated(what, "creating it"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
            made = cls(path, fd, run=run, writable=True)
            try:
                _take_lock(fd, what)
                made._reserve(room_bytes, stopped)
            except BaseException:
                made.close(keep=False)
                raise
        return made

    @classmethod
    def open(cls, path: Path, *, run: str, writable: bool) -> ImageFile:
        """Open the file of an earlier process, or of another one that is alive if it is not ``writable``.

        Raises KeyNotFoundError if there is none, LockError if another process uses it, ConfigError for one that is no
        image of this run.
        """
        what = _what(path)
        with _translated(what, "opening it"):
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN_FLAGS)
            made = cls(path, fd, run=run, writable=writable)
            try:
                if writable:
                    _take_lock(fd, what)
                made._adopt()
            except BaseException:  # the file stays as it is
                made.closed = True
                made.release_descriptor()
                raise
        return made

    @property
    def what(self) -> str:
        return _what(self.path)

    @property
    def is_free(self) -> bool:
        return self.region is None and self.damage is None

    def require_writable(self, doing: str) -> None:
        if self.closed:
            raise ValueError(f"{self.what}: {doing}: it is closed")
        if not self._writable:
            raise ValueError(f"{self.what}: {doing}: it was opened for reading")

    def take(self, *, image_bytes: int, shard: Shard) -> Region:
        """Use a free file, which has room, for an image. Its bytes are not cleared."""
        with self.guard:
            self.require_writable("taking it")
            assert self.is_free, self.what
            if self._mapping is None:
                self._map()
            self.region = Region(self, image_bytes=image_bytes, shard=shard)
            return self.region

    def clear(self) -> None:
        """Free a file whose header is damaged."""
        with self.guard:
            self.require_writable("clearing it")
            os.pwrite(self._fd, bytes(PAGE_BYTES), 0)
            self.damage = None
            self.room_bytes = 0  # its memory may not be reserved

    def exists(self) -> bool:
        """Whether the path still names this file, in its length. Its time is updated once an hour, against cleaners.

        Raises BackendError if that is unknown.
        """
        if self.closed:
            return True
        with _translated(self.what, "looking for it"):
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return False
            mine = os.fstat(self._fd)
            is_cut = self.room_bytes and mine.st_size < IMAGE_START + self.room_bytes
            if not os.path.samestat(named, mine) or is_cut:
                return False
            if self._writable and time.time() - mine.st_mtime > TOUCH_EVERY_S:
                os.utime(self._fd)
            return True

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with the file's bytes from ``start``. This touches no page of the mapping. If all of them are
        touched already, copying from there takes less time than reading the file."""
        mapping = self._mapping
        if mapping is not None and start + len(view) <= IMAGE_START + self.touched_bytes:
            target = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ctypes.memmove(target, address_of(mapping) + start, len(view))
            return
        with _translated(self.what, "reading it"):
            while view:
                count = os.preadv(self._fd, [view], start)
                if not count:
                    raise IntegrityError(f"{self.what}: it is truncated at byte {start}")
                start, view = start + count, view[count:]

    def close(self, *, keep: bool) -> None:
        """Close the file, and delete it unless ``keep`` is set and it has an image, sealed or unreadable. May be called
        twice.

        The memory is freed with the last view of it. Copies from the device must have ended: the pages are unlocked.
        """
        with self.guard:
            if self.closed:
                return
            region = self.region
            has_image = self.damage is not None or (region is not None and region.sealed)
            try:
                if not (keep and has_image):
                    self.remove()
            finally:
                self.closed = True
                if region is not None:
                    region.drop_view()
                self._unmap()
                if self._writable:  # a child that is being forked has the descriptor, too
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
                self.release_descriptor()

    def remove(self) -> None:
        """Delete the file, unless it was opened for reading, or another one has its name by now."""
        with _translated(self.what, "removing it"):
            if self._writable and not self.closed and self.exists():
                os.unlink(self.path)

    def release_descriptor(self) -> None:
        """Close the descriptor; in a forked child, the parent's lock stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # Preparation -------------------------------------------------------------------------------------

    def touch_some(self) -> bool:
        """Touch the next pages of the room; False if all are touched. The file's lock is not held meanwhile."""
        with self.guard:
            if self._mapping is None and self.is_free and not self.closed and self.room_bytes:
                self._map()
            mapping, start = self._mapping, self.touched_bytes
            end = min(start + TOUCH_BYTES, self.room_bytes)
        if mapping is None or start >= end:
            return False
        populate(mapping, IMAGE_START + start, IMAGE_START + end)
        with self.guard:
            if self._mapping is mapping:
                self.touched_bytes = end
        return True

    def lock_some(self, device: torch.device) -> str | None:
        """Lock the next touched pages for copies from a device. Return why they are not locked; '' if they are; None if
        there are none to lock now. That is so while an image is filled: a copy to memory that is locked in part is
        refused."""
        with self.guard:
            start = self.locked_bytes
            end = min(start + PIECE_BYTES, self.room_bytes)
            is_filling = self.region is not None and self.region.filling
            if self._mapping is None or not start < end <= self.touched_bytes or is_filling:
                return None
            lock = pinned.lock_pages(
                address_of(self._mapping) + IMAGE_START + start, end - start, device
            )
            if not lock.locked:
                return lock.reason
            self._locks.append(lock)
            self.locked_bytes = end
            return ""

    # Its memory --------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Read the header of a file that is there."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{self.what}: not a regular file; {_remove(self.path)}")
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.what}: belongs to user {status.st_uid}, expected {os.geteuid()}: run this as that user, or set "
                "another `folder`"
            )
        self.room_bytes = max(0, status.st_size - IMAGE_START) // PAGE_BYTES * PAGE_BYTES
        self.header = os.pread(self._fd, PAGE_BYTES, 0)
        try:
            seal = read_header(self.header, what=self.what)
            if seal is not None and seal.room_bytes > self.room_bytes:
                raise IntegrityError(f"{self.what}: it is truncated")
        except (IntegrityError, NotSupportedError) as error:
            self.damage = error
            return
        except ConfigError as error:
            raise ConfigError(f"{error}; {_remove(self.path)}") from error
        if seal is None:
            if status.st_blocks * 512 < PAGE_BYTES + self.room_bytes:
                self.room_bytes = 0  # its reservation was interrupted
            return
        if seal.run != self.run:
            raise ConfigError(
                f"{self.what}: it has an image of run {seal.run!r}, expected {self.run!r}; choose another run name or "
                f"`folder`, or {_remove(self.path)}"
            )
        self._map()
        self.region = Region(self, image_bytes=seal.image_bytes, shard=seal.shard, seal=seal)

    def _reserve(self, room_bytes: int, stopped: Callable[[], bool]) -> None:
        measure_room(self.path.parent).require(
            room_bytes, what=f"{self.what}: reserving memory for an image of {sized(room_bytes)}"
        )
        os.posix_fallocate(self._fd, 0, PAGE_BYTES)
        logged_s = time.monotonic()
        for start in range(0, room_bytes, RESERVE_BYTES):
            if stopped():
                raise BackendError(f"{self.what}: reserving memory: it is closed")
            length = min(RESERVE_BYTES, room_bytes - start)
            try:
                os.posix_fallocate(self._fd, IMAGE_START + start, length)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    raise
                raise CapacityError(
                    f"{self.what}: reserving memory: needed {sized(room_bytes)}, available were {sized(start)} and "
                    f"less than {sized(length)} more; {WHAT_HELPS}"
                ) from error
            if time.monotonic() - logged_s >= LOG_EVERY_S:
                logged_s = time.monotonic()
                logger.info("%s: %d of %d MiB ready", self.what, start >> 20, room_bytes >> 20)
        self.room_bytes = room_bytes

    def _map(self) -> None:
        total = IMAGE_START + self.room_bytes
        with _translated(self.what, "mapping it"):
            if not self._writable:
                protection = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
                self.view = memoryview(mmap.mmap(self._fd, total, **protection))
                return
            # A mapping keeps a descriptor, also in a forked child: one that has no part in the lock.
            other = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = fork_safe_mapping(other, total)
            finally:
                os.close(other)
        self.view = memoryview(self._mapping)
        if not any(self.view[: len(MAGIC)]):
            self.view[: len(MAGIC)] = MAGIC

    def _unmap(self) -> None:
        """Unlock the pages, and drop the view: the mapping ends with the last view of it."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        self.locked_bytes = 0
        self._mapping = None
        self.touched_bytes = 0
        self.view = memoryview(b"")


def remove_image_file(path: Path) -> None:
    """Delete an image file without reading it. Raises LockError if a process uses it."""
    with _translated(_what(path), "removing it"):
        try:
            fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        except FileNotFoundError:
            return
        try:
            _take_lock(fd, _what(path))
            os.unlink(path)
        finally:
            os.close(fd)


def _take_lock(fd: int, what: str) -> None:
    for tries_left in reversed(range(LOCK_TRIES)):  # its owner may be ending
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not tries_left:
                raise LockError(
                    f"{what}: another process of this run uses it: wait for it, or end it"
                ) from error
            time.sleep(LOCK_POLL_S)


def _what(path: Path) -> str:
    return f"image file {path}"


def _remove(path: Path) -> str:
    return f"remove {path} (an image that only it has is lost) or set another `folder`"


@contextlib.contextmanager
def _translated(what: str, doing: str) -> Iterator[None]:
    """Raise errors of the operating system as errors of this package."""
    try:
        yield
    except FileNotFoundError as error:
        raise KeyNotFoundError(f"{what}: {doing}: {error}; nothing is there") from error
    except PermissionError as error:
        raise AccessDeniedError(f"{what}: {doing}: {error}; check owner and mode") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ConfigError(
                f"{what}: {doing}: a link, or no regular file; remove it, or set another `folder`"
            ) from error
        raise BackendError(f"{what}: {doing}: {error}") from error


def _release_inherited() -> None:
    """A forked child must not hold the locks of its parent."""
    for file in list(_open_files):
        file.release_descriptor()


os.register_at_fork(after_in_child=_release_inherited)


# MADV_POPULATE_WRITE of Linux 5.14; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23
# Linux on x86, Arm, RISC-V and POWER; the mmap module does not name it.
_MAP_FIXED = 0x10

_mappings: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The writable mappings of this process, with their addresses."""


def fork_safe_mapping(fd: int, length_bytes: int) -> mmap.mmap:
    """Map a file, shared and writable, in this process only.

    The kernel leaves the range out of a forked child. A child of ``os.fork`` gets read-only zeros at the same
    addresses.
    """
    mapping = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED)
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings[mapping] = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return mapping


def _cover(address: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    target = (ctypes.c_void_p(address), ctypes.c_size_t(length))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(*target, mmap.PROT_READ, flags, -1, ctypes.c_long(0)) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {length} bytes: {os.strerror(number)}")


def _cover_in_child() -> None:
    """Map read-only zeros over the ranges of the parent's mappings. Left free, a range could be used by another mapping
    of the child, which the deallocation of the inherited mapping object would then unmap. Read-only memory does not
    count as committed."""
    for mapping, address in list(_mappings.items()):
        try:
            _cover(address, len(mapping))
        except OSError as error:
            logger.debug("fork: the range of a mapping was not covered: %s", error)


os.register_at_fork(after_in_child=_cover_in_child)


def address_of(mapping: mmap.mmap) -> int:
    """The address of a mapping that ``fork_safe_mapping`` has made."""
    return _mappings[mapping]


def populate(mapping: mmap.mmap, start: int, end: int) -> None:
    """Allocate every page of the range and enter it in the page table: a first touch costs ten times the copy. Other
    threads of Python run meanwhile, since Linux 5.14."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(_mappings[mapping] + start), ctypes.c_size_t(end - start)
    if libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"touching {end - start} bytes: {os.strerror(number)}")
    # A kernel before 5.14: read one byte of each page.
    memoryview(mapping)[start : end : mmap.PAGESIZE].tobytes()
