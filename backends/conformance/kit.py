"""Helpers of the conformance checks: patterns, whole reads and writes, threads, expected errors.

They use the contract only, and no code of a backend, so that a defect there is not repeated here.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from tierfall.backends.toolkit.views import aligned_block
from tierfall.core.types.backend import Backend, Publish, Traits, Writer
from tierfall.core.types.errors import BackendError

MEMORY_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Makes the backends of a check: ``make`` an empty one, ``reopen`` a second one on the same place, as another
    process would (None: the place exists only in its backend object). ``keeps_unfinished``: a dead writer leaves data
    at the place."""

    make: Callable[[], Backend]
    reopen: Callable[[Backend], Backend] | None = None
    keeps_unfinished: bool = True

    @contextmanager
    def backend(self) -> Iterator[Backend]:
        made = self.make()
        try:
            yield made
        finally:
            made.close()

    @contextmanager
    def reopened(self, backend: Backend) -> Iterator[Backend]:
        """Open a second backend on the place; without ``reopen``, yield the same one."""
        if self.reopen is None:
            yield backend
            return
        second = self.reopen(backend)
        try:
            yield second
        finally:
            second.close()


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return pseudorandom bytes, the same for the same seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def in_memory(data: bytes, *, shift: int = 0) -> memoryview:
    """Return a writable copy that begins ``shift`` bytes after an aligned address."""
    block = aligned_block(len(data) + shift, MEMORY_ALIGNMENT_BYTES)
    view = block[shift : shift + len(data)]
    view[:] = data
    return view


def piece_bytes(traits: Traits, wanted: int) -> int:
    """Return the length of one write: ``wanted``, or more if the traits need it."""
    return max(wanted, traits.part_bytes_min)


def ranges(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def write_pieces(writer: Writer, traits: Traits, view: memoryview, step: int) -> None:
    for start, end in ranges(view.nbytes, piece_bytes(traits, step)):
        writer.write(start, view[start:end])


def put(backend: Backend, key: str, data: bytes, *, publish: Publish = Publish.REPLACE) -> None:
    """Write and publish an object."""
    with backend.create(key, length=len(data), publish=publish) as writer:
        write_pieces(writer, backend.traits, in_memory(data), max(len(data), 1))
        writer.publish()


def get(backend: Backend, key: str) -> bytes:
    """Read a whole object."""
    return read(backend, key, 0, backend.stat(key).bytes)


def read(backend: Backend, key: str, offset: int, size_bytes: int, *, shift: int = 0) -> bytes:
    view = in_memory(b"\xee" * size_bytes, shift=shift)
    backend.read_into(key, offset, view)
    return bytes(view)


def keys(backend: Backend, prefix: str = "") -> list[str]:
    return [stored.key for stored in backend.scan(prefix)]


def refused(kind: type[BackendError], call: Callable[[], object], what: str) -> BackendError:
    """Make a call that must raise ``kind``, and return its error."""
    try:
        call()
    except kind as error:
        return error
    except BackendError as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, not {error!r}") from error
    raise AssertionError(f"{what}: expected {kind.__name__}, but it went through")


def in_threads(count: int, call: Callable[[int], object]) -> list[BackendError | None]:
    """Make ``call`` in ``count`` threads at once; return the BackendError of each, and raise any other exception."""
    start = threading.Barrier(count)

    def body(index: int) -> BackendError | None:
        start.wait()
        try:
            call(index)
        except BackendError as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, range(count)))


def no_errors(errors: list[BackendError | None]) -> None:
    for error in errors:
        if error is not None:
            raise AssertionError(f"a thread failed: {error!r}") from error
