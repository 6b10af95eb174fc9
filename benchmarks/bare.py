"""The references: the same bytes copied, written, read and hashed with nothing around it.

Each does what the hardware and torch give a careful program, and no more: no names, no manifests, no threads but those
that the definition of the reference gives it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from tierfall.backends.posix import system
from tierfall.core.runtime.pinned import PageLock, lock_pages, synchronize

PIECE_BYTES = 16 << 20
BLOCK_BYTES = 4096
SPARE_BYTES = 4 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
WRITE_THREADS = 2
READ_THREADS = 4
IN_MEMORY = ("tmpfs", "ramfs")


class Buffer:
    """Page-aligned memory with a tensor view for each tensor of a state, laid out one after the other.

    ``whole`` has some room more, so that an image with its header can be read into it. ``huge`` asks for huge pages,
    where the kernel gives them on request. Touched memory is page-locked where the state is on a GPU, and RuntimeError
    is raised where that is refused: what a pinned copy takes would not be known.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], *, touched: bool, huge: bool = False
    ) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        self.bytes = in_blocks(size)
        memory = mmap.mmap(-1, self.bytes + SPARE_BYTES, flags=PRIVATE)
        if huge:
            with suppress(OSError):  # a kernel that knows none
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.whole = memoryview(memory)
        flat = torch.frombuffer(self.whole, dtype=torch.uint8)
        if touched:
            flat.fill_(1)
        if touched and any(tensor.is_cuda for tensor in tensors):
            self._lock_pages(flat)  # as whoever copies to and from a GPU does
        self.tensors: list[torch.Tensor] = []
        start = 0
        for tensor in tensors:
            part = flat[start : start + tensor.nbytes]
            self.tensors.append(part.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes

    def _lock_pages(self, flat: torch.Tensor) -> None:
        """Lock the memory for as long as the buffer lives: unmapped while locked, it would stay so in the driver."""
        lock = lock_pages(flat.data_ptr(), flat.nbytes)
        if not lock.locked:
            raise RuntimeError(f"the reference's buffer cannot be page-locked: {lock.reason}")
        weakref.finalize(self, _unlock, lock, self.whole)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a state into the buffer."""
        copy_all(self.tensors, tensors)

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the buffer into a state."""
        copy_all(tensors, self.tensors)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Say whether a state has these very bits."""
        pairs = zip(self.tensors, tensors, strict=True)
        return all(
            torch.equal(mine.view(-1).view(torch.uint8), other.cpu().view(-1).view(torch.uint8))
            for mine, other in pairs
        )

    @property
    def view(self) -> memoryview:
        return self.whole[: self.bytes]


def in_blocks(size_bytes: int) -> int:
    """Round up to what direct I/O takes."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, at torch's own number of threads; return when all is copied, on a GPU too."""
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    synchronize()


def _unlock(lock: PageLock, memory: memoryview) -> None:
    """Unlock memory, which is kept mapped until then."""
    lock.release()


def direct_works(folder: Path, file_system: str) -> bool:
    """Say whether direct I/O is real in a folder, found out by writing one block."""
    if file_system in IN_MEMORY:
        return False
    path = folder / ".direct"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwrite(descriptor, mmap.mmap(-1, BLOCK_BYTES), 0) == BLOCK_BYTES
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink()


def write_file(path: Path, view: memoryview, *, direct: bool, threads: int = WRITE_THREADS) -> None:
    """Make a durable file: reserve, write with some threads, fsync, rename, fsync the folder."""
    partial = path.with_name(path.name + ".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    descriptor = os.open(partial, flags, 0o600)
    try:
        system.fallocate(descriptor, view.nbytes)
        _in_pieces(threads, view, lambda part, at: _write(descriptor, part, at))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(partial, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_file(path: Path, view: memoryview, *, direct: bool) -> None:
    """Read a whole file with 4 threads; the view is at least as long as the file, in whole blocks."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        size = os.fstat(descriptor).st_size
        _in_pieces(
            READ_THREADS,
            view[: in_blocks(size)],
            lambda part, at: _read(descriptor, part, at, size),
        )
    finally:
        os.close(descriptor)


def hash_all(view: memoryview, threads: int) -> None:
    """XXH3-128 of each piece."""
    _in_pieces(threads, view, lambda part, at: xxhash.xxh3_128_digest(part))


def drop_cached(path: Path) -> None:
    """Drop a file's clean pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def keep_cached(path: Path) -> None:
    """Bring a whole file into the page cache, where there is room for it."""
    block = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            continue


def give_back_freed() -> None:
    """Return freed memory to the system, so that what is allocated next is fresh."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _in_pieces(threads: int, view: memoryview, do: Callable[[memoryview, int], object]) -> None:
    starts = range(0, view.nbytes, PIECE_BYTES)
    with ThreadPoolExecutor(threads) as executor:
        for _ in executor.map(lambda at: do(view[at : at + PIECE_BYTES], at), starts):
            continue


def _write(descriptor: int, part: memoryview, at: int) -> None:
    done = 0
    while done < part.nbytes:
        done += os.pwrite(descriptor, part[done:], at + done)


def _read(descriptor: int, part: memoryview, at: int, size: int) -> None:
    wanted = min(part.nbytes, size - at)
    done = 0
    while done < wanted:
        count = os.preadv(descriptor, [part[done:]], at + done)
        if count == 0:
            raise OSError(f"the file ended at {at + done}, expected {size} bytes")
        done += count
