"""The reads of a restore: every chunk is verified, and read from the fastest good copy.

Several threads each read a chunk, hash it, and copy it to its targets. A chunk in storage is read through a reused
aligned buffer. A chunk in the page cache, or in host memory, is read into its targets and hashed there
(docs/decisions/0014). Copies to devices are queued, from page-locked buffers, so that reading continues meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.cached_reads import TargetWriter, copy_bytes, digest_pieces
from tierfall.core.copies.images import READ_THREADS, Image, PackedImage, check_digest, read_chunk
from tierfall.core.copies.to_device import DeviceCopies, Piece
from tierfall.core.format.records import DIGEST_PREFIX, Manifest
from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import Buffer, BufferPool, allocate, is_being_filled
from tierfall.core.runtime.cores import hash_threads
from tierfall.core.runtime.streams import Streams
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

BUFFER_BYTES = 64 << 20
"""Of all buffers of a restore from storage to host memory."""
DEVICE_BUFFER_BYTES = 192 << 20
"""Of all buffers of a restore to a device, which reads some while others are filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A source that was skipped, and why: a tier, a copy, a chunk of it, or a whole step. ``id`` is its
    checkpoint; None for a tier."""

    what: str
    reason: str
    id: CheckpointId | None = None


FoundDamage = Callable[[str, CheckpointId, TierfallError], None]


@dataclass(slots=True)
class ReadTally:
    """The bytes that a restore has read, by tier; those received from other ranks, by tier and rank; and the skipped
    sources.

    It is shared by the reading threads. ``found_damage`` is called once for each copy that does not match its digests
    or is missing, by any of these threads. ``found_unread`` is called for each checkpoint that could not be read, and
    was not restored for that: no rule may delete it.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    received: dict[tuple[str, int], int] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    found_damage: FoundDamage = lambda *found: None
    found_unread: Callable[[CheckpointId], None] = lambda id: None
    damaged: set[tuple[str, CheckpointId]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, tier: str, bytes: int) -> None:
        with self.lock:
            self.bytes[tier] = self.bytes.get(tier, 0) + bytes

    def add_received(self, tier: str, rank: int, bytes: int) -> None:
        """Add bytes that another rank read from the tier and sent."""
        with self.lock:
            self.received[tier, rank] = self.received.get((tier, rank), 0) + bytes

    def describe(self) -> str:
        """Return how much was read so far, and from where."""
        with self.lock:
            read = [f"{format_size(n)} from {tier}" for tier, n in self.bytes.items()]
            received = sum(self.received.values())
        read += [f"{format_size(received)} from other ranks"] if received else []
        return f"{', '.join(read) or 'nothing'} is read so far"

    def add_skipped(self, what: str, reason: object, id: CheckpointId | None = None) -> None:
        with self.lock:
            self.fallbacks.append(Fallback(what=what, reason=str(reason), id=id))

    def note_damage(self, tier: str, id: CheckpointId, error: TierfallError) -> None:
        """Report a copy as damaged, if the error shows that it is."""
        if not error.is_damage:
            return
        with self.lock:
            known = (tier, id) in self.damaged
            self.damaged.add((tier, id))
        if not known:
            self.found_damage(tier, id, error)


class ChunkReader:
    """Reads verified chunks of one image from any good copy. Thread-safe."""

    def __init__(self, images: Sequence[Image], manifest: Manifest, tally: ReadTally) -> None:
        """``images`` are copies with this manifest, fastest first."""
        self._images = images
        self._manifest = manifest
        self._tally = tally

    def read(self, index: int, buffer: memoryview) -> memoryview:
        """Return the verified bytes of chunk ``index``, which may be in ``buffer``. Raises as ``read_from`` does."""
        return self.read_from(index, buffer)[0]

    def read_from(self, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        """Return the verified bytes of chunk ``index``, which may be in ``buffer``, and the tier that they were read
        from.

        Raises IntegrityError if all copies of it are damaged, or were all deleted meanwhile. Raises the error of a copy
        that could not be read, if no other is good: that copy may be.
        """
        start, end = self._manifest.chunk_range(index)
        id = self._manifest.lineage.checkpoint
        failures: list[TierfallError] = []
        for image in self._images:
            if is_being_filled(buffer):
                buffer = allocate(len(buffer))
            try:
                view = read_chunk(
                    image,
                    self._manifest,
                    index,
                    buffer,
                    on_misread=partial(self._add_misread, image, index),
                )
            except (IntegrityError, BackendError, NotSupportedError) as error:
                failures.append(error)
                self._tally.add_skipped(self._what(image, index), error, id)
                self._tally.note_damage(image.tier, id, error)
                continue
            self._tally.read(image.tier, end - start)
            return view, image.tier
        for failure in failures:
            if not failure.is_damage:
                raise failure
        if all(isinstance(failure, KeyNotFoundError) for failure in failures) and self._is_gone():
            raise IntegrityError(f"{id} was deleted while it was read: no copy is left")
        raise IntegrityError(
            f"chunk {index} is damaged in every copy that was read: "
            + "; ".join(map(str, failures))
        )

    def fill_from_page_cache(
        self, index: int, pieces: Callable[[xxhash.xxh3_128], Iterable[memoryview]]
    ) -> bool:
        """Read chunk ``index`` into its targets if the fastest copy has it in memory of this machine. ``pieces`` yields
        the views to fill, and adds them to the digest. Returns False if the chunk has to be read otherwise: it is not
        there, or does not match its digest."""
        image, digest = self._images[0], xxhash.xxh3_128()
        try:
            if not image.read_cached(self._manifest, index, pieces(digest)):
                return False
            check_digest(image.tier, self._manifest, index, DIGEST_PREFIX + digest.hexdigest())
        except (IntegrityError, BackendError):  # the following read reports it
            logger.debug("%s is not good in memory", self._what(image, index), exc_info=True)
            return False
        start, end = self._manifest.chunk_range(index)
        self._tally.read(image.tier, end - start)
        return True

    def _add_misread(self, image: Image, index: int, error: IntegrityError) -> None:
        what = f"the first read of {self._what(image, index)}"
        self._tally.add_skipped(what, error, self._manifest.lineage.checkpoint)

    def _what(self, image: Image, index: int) -> str:
        return f"chunk {index} of {self._manifest.lineage.checkpoint} on {image.tier}"

    def _is_gone(self) -> bool:
        """Return whether the manifests of all copies are gone too, as after a deletion; otherwise only an image is
        missing."""
        for image in self._images:
            try:
                image.manifest_bytes()
            except KeyNotFoundError:
                continue
            except TierfallError:
                return False
            return False
        return True


def count_threads(
    manifest: Manifest,
    images: Sequence[Image],
    chunks_max: int | None = None,
    *,
    verifying: int = 1,
) -> int:
    """Return how many chunks are read at once onto host memory, such that buffers have at most BUFFER_BYTES, and at
    most the size of ``chunks_max`` chunks, if given (a packed chunk counts as two). ``verifying``: so many threads
    verify chunks that are in memory."""
    if all(image.in_memory for image in images):
        threads = verifying
    else:
        largest = max(manifest.data_start, manifest.chunk_bytes)
        threads = max(1, min(READ_THREADS, BUFFER_BYTES // largest))
    if chunks_max is None:
        return threads
    each = 2 if any(isinstance(image, PackedImage) for image in images) else 1
    return max(1, min(threads, chunks_max // each))


def read_fills(
    reader: ChunkReader,
    manifest: Manifest,
    fills: Sequence[Fill],
    threads: int,
    pool: BufferPool,
    streams: Streams,
) -> None:
    """Fill the targets of every fill. Raises the first failure once all threads have stopped.

    When it returns or raises, no copy is in progress. Work queued on a target's device afterwards runs after the
    copies.
    """
    writer = TargetWriter(fills)
    copies = DeviceCopies(fills, pool, streams)

    def read(index: int) -> None:
        low, high = manifest.chunk_range(index)
        with pool.lend(high - low) as buffer:
            read_chunk_to_targets(reader, manifest, index, writer, copies, buffer)

    try:
        run_in_threads(threads, read, _chunks_of(manifest, fills))
    finally:
        copies.finish()


def read_chunk_to_targets(
    reader: ChunkReader,
    manifest: Manifest,
    index: int,
    writer: TargetWriter,
    copies: DeviceCopies,
    buffer: Buffer,
) -> None:
    """Read a chunk and copy it to its targets; copies to devices are queued.

    A chunk in the page cache, or in memory of this machine, is hashed piece by piece while it is in the processor's
    cache: on its way to targets in host memory, or to the page-locked buffer that a device copies from.
    """
    low, high = manifest.chunk_range(index)
    start, end = low - manifest.data_start, high - manifest.data_start
    if writer.is_in_host_memory(start, end):
        if reader.fill_from_page_cache(
            index, lambda digest: writer.pieces(start, end, buffer.view, digest)
        ):
            return
        view = reader.read(index, buffer.view)
    else:
        view = buffer.view[: high - low]
        if not reader.fill_from_page_cache(index, partial(digest_pieces, view)):
            view = reader.read(index, buffer.view)
    scatter(view, start, writer, copies, buffer)


def _chunks_of(manifest: Manifest, fills: Sequence[Fill]) -> list[int]:
    indexes: set[int] = set()
    for fill in fills:
        if fill.end > fill.start:
            first = fill.start // manifest.chunk_bytes
            last = (fill.end - 1) // manifest.chunk_bytes
            indexes.update(range(first + 1, last + 2))
    return sorted(indexes)


def scatter(
    view: memoryview, start: int, writer: TargetWriter, copies: DeviceCopies, buffer: Buffer
) -> None:
    """Copy bytes that begin at ``start`` of the data to all targets; queue the copies to devices."""
    source = torch.frombuffer(view, dtype=torch.uint8)
    address = source.data_ptr()
    on_devices: dict[torch.device, list[Piece]] = {}
    for fill, low, high in writer.within(start, start + len(view)):
        for target in fill.targets:
            if target.is_cpu:
                copy_bytes(target.data_ptr() + low - fill.start, address + low - start, high - low)
            else:
                part = target[low - fill.start : high - fill.start]
                on_devices.setdefault(target.device, []).append((part, low - start))
    for device, pieces in on_devices.items():
        copies.launch(device, source, pieces, buffer)


class BufferRing:
    """Buffers for chunks of one size, raw or packed, and copy streams. Keep it between restores: first touches cost
    more than reads, and page-locking more than copying.

    ``threads`` verify chunks at once. ``count`` buffers are allocated when first needed: one for each thread, and more
    that a device copies from meanwhile.
    """

    def __init__(
        self,
        chunk_bytes: int,
        *,
        count_max: int | None = None,
        threads: int | None = None,
        streams: Streams | None = None,
    ) -> None:
        """All buffers together have at most DEVICE_BUFFER_BYTES, unless one chunk needs more."""
        self.threads = threads or hash_threads()
        if count_max is None:
            count_max = max(READ_THREADS, self.threads) + 2
        self.count = max(1, min(count_max, DEVICE_BUFFER_BYTES // chunk_bytes))
        self.pool = BufferPool(bytes=frame_bytes_max(chunk_bytes), count=self.count)
        self.streams = streams or Streams()

    def release(self) -> None:
        """Unlock the buffers and free their memory. No restore may be in progress."""
        self.pool.release()
