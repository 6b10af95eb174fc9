"""The reads of a restore: every chunk verified, from the fastest copy that is good.

A few threads each read a chunk, hash it, and scatter it to its targets. From storage it goes through a reused aligned
buffer, from host memory it is taken where it lies, and out of the page cache it is read to where it belongs and hashed
there (docs/decisions/0014). What goes onto a device is only queued: reading goes on meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.cached_reads import TargetWriter, WrittenTargets, copy_bytes
from tierfall.core.copies.images import READ_THREADS, Image, PackedImage
from tierfall.core.copies.to_device import DeviceCopies, Piece
from tierfall.core.format.records import DIGEST_PREFIX, Manifest
from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import Buffer, BufferPool, allocate, is_being_filled
from tierfall.core.runtime.streams import Streams
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import BackendError, IntegrityError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

MEMORY_THREADS = 8
BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Something that was passed over, and why: a tier, a copy, a chunk of it, or a whole step."""

    what: str
    reason: str


FoundDamage = Callable[[str, CheckpointId, TierfallError], None]


def _ignore_damage(tier: str, id: CheckpointId, error: TierfallError) -> None:
    """Nobody asked to hear of damaged copies."""


@dataclass(slots=True)
class ReadTally:
    """What a restore has read, by tier, what it got from other ranks, by tier and rank, and what it passed over. Shared
    by the reading threads, of which any tells ``found_damage``, once for each copy that is not what was written, or is
    not there."""

    bytes: dict[str, int] = field(default_factory=dict)
    received: dict[tuple[str, int], int] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    found_damage: FoundDamage = _ignore_damage
    damaged: set[tuple[str, CheckpointId]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, tier: str, bytes: int) -> None:
        with self.lock:
            self.bytes[tier] = self.bytes.get(tier, 0) + bytes

    def add_received(self, tier: str, rank: int, bytes: int) -> None:
        """Note what another rank has read there, and handed on."""
        with self.lock:
            self.received[tier, rank] = self.received.get((tier, rank), 0) + bytes

    def add_skipped(self, what: str, reason: object) -> None:
        with self.lock:
            self.fallbacks.append(Fallback(what=what, reason=str(reason)))

    def note_damage(self, tier: str, id: CheckpointId, error: TierfallError) -> None:
        """Note what kept a copy from being read: that it could not be asked says nothing of it."""
        if not isinstance(error, (IntegrityError, KeyNotFoundError)):
            return
        with self.lock:
            known = (tier, id) in self.damaged
            self.damaged.add((tier, id))
        if not known:
            self.found_damage(tier, id, error)


class ChunkReader:
    """Reads verified chunks of one image, from whichever of its copies is good. Thread-safe."""

    def __init__(self, images: Sequence[Image], manifest: Manifest, tally: ReadTally) -> None:
        """``images`` are copies that carry this very manifest, fastest first."""
        self._images = images
        self._manifest = manifest
        self._tally = tally

    def read(self, index: int, buffer: memoryview) -> memoryview:
        """Return the verified bytes of chunk ``index``; they may lie in ``buffer``. Raises as ``read_from`` does."""
        return self.read_from(index, buffer)[0]

    def read_from(self, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        """Return the verified bytes of chunk ``index``, which may lie in ``buffer``, and the tier that had them.

        Raises IntegrityError when every copy of it is damaged, or all were dropped meanwhile, and the retryable error
        when one could not be read and no other is good: that copy may well be.
        """
        start, end = self._manifest.chunk_range(index)
        failures: list[TierfallError] = []
        for image in self._images:
            if is_being_filled(buffer):
                buffer = allocate(len(buffer))
            try:
                view = self._read(image, index, buffer)
            except (IntegrityError, BackendError) as error:
                failures.append(error)
                self._tally.add_skipped(self._what(image, index), error)
                self._tally.note_damage(image.tier, self._manifest.lineage.checkpoint, error)
                continue
            self._tally.read(image.tier, end - start)
            return view, image.tier
        for failure in failures:
            if failure.retryable:
                raise failure
        if all(isinstance(failure, KeyNotFoundError) for failure in failures) and self._is_gone():
            raise IntegrityError(
                f"{self._manifest.lineage.checkpoint} was dropped while it was read: no copy is there any more"
            )
        raise IntegrityError(
            f"chunk {index} is damaged in every copy that was read: "
            + "; ".join(map(str, failures))
        )

    def fill_from_page_cache(
        self, index: int, pieces: Callable[[xxhash.xxh3_128], Iterable[memoryview]]
    ) -> bool:
        """Bring chunk ``index`` to where it belongs, if the fastest copy has it in the page cache: ``pieces`` are the
        memory that it goes to, and hash what they got. False where it must be read otherwise, since it is not there, or
        is not good there."""
        image, digest = self._images[0], xxhash.xxh3_128()
        try:
            if not image.read_cached(self._manifest, index, pieces(digest)):
                return False
            self._compare(image, index, DIGEST_PREFIX + digest.hexdigest())
        except (IntegrityError, BackendError):  # whoever reads it otherwise tells of it
            logger.debug(
                "%s is not good in the page cache", self._what(image, index), exc_info=True
            )
            return False
        start, end = self._manifest.chunk_range(index)
        self._tally.read(image.tier, end - start)
        return True

    def _read(self, image: Image, index: int, buffer: memoryview) -> memoryview:
        """Return a good chunk of an image. What comes from storage is read twice before it is taken for damaged: a
        cache, or the way from there, may be what is not good."""
        try:
            return self._checked(image, index, image.read(self._manifest, index, buffer))
        except IntegrityError as error:
            if image.in_memory:
                raise
            first = error
        view = self._checked(image, index, image.read(self._manifest, index, buffer, again=True))
        self._tally.add_skipped(f"the first read of {self._what(image, index)}", first)
        return view

    def _what(self, image: Image, index: int) -> str:
        return f"chunk {index} of {self._manifest.lineage.checkpoint} on {image.tier}"

    def _is_gone(self) -> bool:
        """Say whether the records of all copies have gone too, as a drop takes them: else an image alone is missing."""
        for image in self._images:
            try:
                image.manifest_bytes()
            except KeyNotFoundError:
                continue
            except TierfallError:
                return False
            return False
        return True

    def _checked(self, image: Image, index: int, view: memoryview) -> memoryview:
        self._compare(image, index, chunk_digest(view))
        return view

    def _compare(self, image: Image, index: int, digest: str) -> None:
        if digest != self._manifest.digests[index]:
            raise IntegrityError(
                f"{image.tier}: chunk {index} of {self._manifest.lineage.checkpoint} does not match its digest"
            )


def count_threads(
    manifest: Manifest, images: Sequence[Image], chunks_max: int | None = None
) -> int:
    """Choose how many chunks are read at once, so that the buffers stay within BUFFER_BYTES, and, where that is given,
    within the room of ``chunks_max`` chunks (a packed one takes that of two)."""
    if all(image.in_memory for image in images):
        threads = max(1, min(MEMORY_THREADS, os.cpu_count() or 1))
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
    written: WrittenTargets,
) -> None:
    """Bring the bytes of every fill to its targets. Raises the first failure once all threads have stopped.

    However it ends, no copy is under way any more; what is queued on a target's device later comes after them.
    """
    landing = TargetWriter(fills, written)
    copies = DeviceCopies(fills, pool, streams)

    def read(index: int) -> None:
        low, high = manifest.chunk_range(index)
        with pool.lend(high - low) as buffer:
            read_chunk_to_targets(reader, manifest, index, landing, copies, buffer)

    try:
        run_in_threads(threads, read, _chunks_of(manifest, fills))
    finally:
        copies.finish()


def read_chunk_to_targets(
    reader: ChunkReader,
    manifest: Manifest,
    index: int,
    landing: TargetWriter,
    copies: DeviceCopies,
    buffer: Buffer,
) -> None:
    """Read a chunk, and bring it to its targets; what goes onto a device is queued."""
    low, high = manifest.chunk_range(index)
    start, end = low - manifest.data_start, high - manifest.data_start
    if landing.is_in_host_memory(start, end) and reader.fill_from_page_cache(
        index, lambda digest: landing.pieces(start, end, buffer.view, digest)
    ):
        return
    scatter(reader.read(index, buffer.view), start, landing, copies, buffer)


def _chunks_of(manifest: Manifest, fills: Sequence[Fill]) -> list[int]:
    wanted: set[int] = set()
    for fill in fills:
        if fill.end > fill.start:
            first = fill.start // manifest.chunk_bytes
            last = (fill.end - 1) // manifest.chunk_bytes
            wanted.update(range(first + 1, last + 2))
    return sorted(wanted)


def scatter(
    view: memoryview, start: int, landing: TargetWriter, copies: DeviceCopies, buffer: Buffer
) -> None:
    """Copy bytes that begin at ``start`` of the data to all targets in them; onto devices later."""
    source = torch.frombuffer(view, dtype=torch.uint8)
    address = source.data_ptr()
    end = start + len(view)
    landing.written.add(landing, start, end)
    elsewhere: dict[torch.device, list[Piece]] = {}
    for fill in landing.within(start, end):
        low, high = max(fill.start, start), min(fill.end, end)
        for target in fill.targets:
            if target.is_cpu:
                copy_bytes(target.data_ptr() + low - fill.start, address + low - start, high - low)
            else:
                part = target[low - fill.start : high - fill.start]
                elsewhere.setdefault(target.device, []).append((part, low - start))
    for device, pieces in elsewhere.items():
        copies.launch(device, source, pieces, buffer)
