"""The reads of a restore: every chunk is verified, and read from the fastest good copy.

Several threads each read a chunk, hash it, and copy it to its targets. A chunk in storage is read through a reused
aligned buffer. A chunk in the page cache, or in host memory, is read into its targets and hashed there
(docs/decisions/0014). Copies to devices are queued, from page-locked buffers, so that reading continues meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from tierfall.core.compression.codec import frame_bytes_max
from tierfall.core.copies import chunk_cache
from tierfall.core.copies.chunk_cache import ChunkCache
from tierfall.core.copies.images import READ_THREADS, Image, check_digest, read_chunk
from tierfall.core.format.records import DIGEST_PREFIX, Manifest
from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import Buffer, BufferPool, allocate, is_being_filled
from tierfall.core.runtime.cores import hash_threads
from tierfall.core.runtime.pinned import cut_at, locked_bounds, synchronize
from tierfall.core.runtime.streams import CopyStream, Streams
from tierfall.core.runtime.threads import run_in_threads
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
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

    It is shared by the reading threads. ``others`` are the newest four steps that the request does not name and that
    have a copy without known damage. ``found_damage`` is called once for each copy that does not match its digests or
    is missing, by any of these threads. ``found_unread`` is called for each checkpoint that could not be read, and was
    not restored for that: no rule may delete it. ``on_planned`` is called with the bytes that are to be read from then
    on, ``on_bytes`` with those of each chunk once its targets are filled.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    received: dict[tuple[str, int], int] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    found_damage: FoundDamage = lambda *found: None
    found_unread: Callable[[CheckpointId], None] = lambda id: None
    on_planned: Callable[[int], None] = lambda count: None
    on_bytes: Callable[[int], None] = lambda count: None
    damaged: set[tuple[str, CheckpointId]] = field(default_factory=set)
    others: tuple[CheckpointId, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, tier: str, bytes: int) -> None:
        with self.lock:
            self.bytes[tier] = self.bytes.get(tier, 0) + bytes

    def add_received(self, tier: str, rank: int, bytes: int) -> None:
        """Add bytes that another rank read from the tier and sent."""
        with self.lock:
            self.received[tier, rank] = self.received.get((tier, rank), 0) + bytes

    def add_skipped(self, what: str, reason: object, id: CheckpointId | None = None) -> None:
        """Add a source. What ``what`` names is not named again: its tier, which it ends with, and the chunk."""
        item, _, tier = what.rpartition(" on ")
        text = str(reason).removeprefix(f"{tier.rpartition(' ')[2]}: ").removeprefix(f"{item} ")
        with self.lock:
            self.fallbacks.append(Fallback(what=what, reason=text, id=id))

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

    def __init__(
        self,
        images: Sequence[Image],
        manifest: Manifest,
        tally: ReadTally,
        cache: ChunkCache | None = None,
    ) -> None:
        """``images`` are copies with this manifest, fastest first; ``cache`` is faster than those on its tiers."""
        self.images = images
        self.manifest = manifest
        self._tally = tally
        self._cache = cache

    def read(self, index: int, buffer: memoryview) -> memoryview:
        """Return the verified bytes of chunk ``index``, which may be in ``buffer``. Raises as ``read_from`` does."""
        return self.read_from(index, buffer)[0]

    def read_from(self, index: int, buffer: memoryview) -> tuple[memoryview, str]:
        """Return the verified bytes of chunk ``index``, which may be in ``buffer``, and the tier that they were read
        from.

        Raises IntegrityError if all copies of it are damaged, or were all deleted meanwhile. Raises the error of a copy
        that could not be read, if no other is good: that copy may be.
        """
        start, end = self.manifest.chunk_range(index)
        id = self.manifest.lineage.checkpoint
        failures: list[TierfallError] = []
        for image in self.images:
            cache = self._cache if self._cache and image.tier in self._cache.tiers else None
            if is_being_filled(buffer):
                buffer = allocate(len(buffer))
            view = buffer[: end - start]
            if cache is not None and cache.read(self.manifest.digests[index], view):
                self._tally.read(chunk_cache.NAME, end - start)
                return view, chunk_cache.NAME
            try:
                view = read_chunk(
                    image,
                    self.manifest,
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
            if cache is not None:
                cache.keep(self.manifest.digests[index], view)
            return view, image.tier
        for failure in failures:
            if not failure.is_damage:
                raise failure
        if all(isinstance(failure, KeyNotFoundError) for failure in failures) and self._is_gone():
            raise IntegrityError(f"{id} was deleted while it was read: no copy is left")
        tiers: dict[str, list[str]] = {}
        for tier, failure in zip((image.tier for image in self.images), failures, strict=True):
            tiers.setdefault(str(failure).removeprefix(f"{tier}: "), []).append(tier)
        raise IntegrityError(
            f"chunk {index} is damaged in every copy that was read: "
            + "; ".join(f"{', '.join(those)}: {why}" for why, those in tiers.items())
        )

    def fill_from_page_cache(
        self, index: int, pieces: Callable[[xxhash.xxh3_128], Iterable[memoryview]]
    ) -> bool:
        """Read chunk ``index`` into its targets if the fastest copy has it in memory of this machine. ``pieces`` yields
        the views to fill, and adds them to the digest. Returns False if the chunk has to be read otherwise: it is not
        there, or does not match its digest."""
        image, digest = self.images[0], xxhash.xxh3_128()
        try:
            if not image.read_cached(self.manifest, index, pieces(digest)):
                return False
            check_digest(image.tier, self.manifest, index, DIGEST_PREFIX + digest.hexdigest())
        except (IntegrityError, BackendError):  # the following read reports it
            logger.debug("%s is not good in memory", self._what(image, index), exc_info=True)
            return False
        start, end = self.manifest.chunk_range(index)
        self._tally.read(image.tier, end - start)
        return True

    def _add_misread(self, image: Image, index: int, error: IntegrityError) -> None:
        what = f"the first read of {self._what(image, index)}"
        self._tally.add_skipped(what, error, self.manifest.lineage.checkpoint)

    def _what(self, image: Image, index: int) -> str:
        return f"chunk {index} of {self.manifest.lineage.checkpoint} on {image.tier}"

    def _is_gone(self) -> bool:
        """Return whether the manifests of all copies are gone too, as after a deletion; otherwise only an image is
        missing."""
        for image in self.images:
            try:
                image.manifest_bytes()
            except KeyNotFoundError:
                continue
            except TierfallError:
                return False
            return False
        return True


class ImageFills(NamedTuple):
    """One image, and what is filled from it; ``fills`` are in image order."""

    reader: ChunkReader
    fills: Sequence[Fill]


def read_fills(
    parts: Mapping[int, ImageFills],
    chunks: Iterable[tuple[int, int]],
    threads: int,
    pool: BufferPool,
    streams: Streams,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Fill the targets of every fill from ``chunks``, begun in this order, each given by the key of its image and its
    number; ``on_bytes`` is called with the bytes of each. Raises the first failure once all threads have stopped.

    When it returns or raises, no copy is in progress. Work queued on a target's device afterwards runs after the
    copies.
    """
    writers = {key: TargetWriter(part.fills) for key, part in parts.items()}
    every = [fill for part in parts.values() for fill in part.fills]
    copies = DeviceCopies(every, pool, streams)

    def read(chunk: tuple[int, int]) -> None:
        key, index = chunk
        reader = parts[key].reader
        low, high = reader.manifest.chunk_range(index)
        with pool.lend(high - low) as buffer:
            read_chunk_to_targets(reader, index, writers[key], copies, buffer)
        on_bytes(high - low)

    try:
        run_in_threads(threads, read, chunks)
    finally:
        copies.finish()


def read_chunk_to_targets(
    reader: ChunkReader, index: int, writer: TargetWriter, copies: DeviceCopies, buffer: Buffer
) -> None:
    """Read a chunk and copy it to its targets; copies to devices are queued.

    A chunk in the page cache, or in memory of this machine, is hashed piece by piece while it is in the processor's
    cache: on its way to targets in host memory, or to the page-locked buffer that a device copies from.
    """
    low, high = reader.manifest.chunk_range(index)
    start, end = low - reader.manifest.data_start, high - reader.manifest.data_start
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


def chunks_of(manifest: Manifest, fills: Sequence[Fill]) -> list[int]:
    """Return the numbers of the chunks that fills need, ascending."""
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


# Targets in host memory ---------------------------------------------------------------------------


# Bytes in the page cache are read into their target and hashed there, while they are in the CPU cache: they cross the
# memory bus once. Targets that overlap are not written this way, since another thread may write to them between read
# and hash.

# Source and target of one copy fit a core's own cache together; longer copies took a fifth more time.
PIECE_BYTES = 512 << 10
# Shorter fills are read through a scratch buffer, many at once.
STRAIGHT_BYTES = 64 << 10


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy bytes from address to address on this thread only: torch's copy would start threads of its own for each
    reading thread."""
    for done in range(0, count, PIECE_BYTES):
        ctypes.memmove(target + done, source + done, min(PIECE_BYTES, count - done))


class TargetWriter:
    """The targets of one image. Shared by the reading threads."""

    def __init__(self, fills: Sequence[Fill]) -> None:
        """``fills`` are in image order."""
        self._fills = fills
        self._ends = [fill.end for fill in fills]
        overlapping = _overlapping(fills)
        self._straight = [
            _memory(fill.targets[0])
            if fill.end - fill.start >= STRAIGHT_BYTES
            and fill.targets[0].is_cpu
            and number not in overlapping
            else None
            for number, fill in enumerate(fills)
        ]

    def within(self, start: int, end: int) -> Iterator[tuple[Fill, int, int]]:
        """Yield the fills that overlap bytes ``start`` to ``end`` of the data, each with the range of these in it."""
        at = bisect_right(self._ends, start)
        while at < len(self._fills) and (fill := self._fills[at]).start < end:
            yield fill, max(fill.start, start), min(fill.end, end)
            at += 1

    def is_in_host_memory(self, start: int, end: int) -> bool:
        """Return whether all targets of a range are in host memory, so that ``pieces`` can fill them."""
        return all(t.is_cpu for fill, _, _ in self.within(start, end) for t in fill.targets)

    def pieces(
        self, start: int, end: int, scratch: memoryview, digest: xxhash.xxh3_128
    ) -> Iterator[memoryview]:
        """Yield views to fill with bytes ``start`` to ``end`` of the data, one after the other. None is longer than
        ``scratch``.

        Each filled view is added to ``digest``, and copied to the further targets of its bytes.
        """
        at = start
        while at < end:
            number = bisect_right(self._ends, at)
            view, first = self._piece(number, at, end, scratch)
            yield view
            digest.update(view)
            if not first or len(self._fills[number].targets) > first:
                self._copy_to_targets(view, at, at + len(view), first=first)
            at += len(view)

    def _piece(self, number: int, at: int, end: int, scratch: memoryview) -> tuple[memoryview, int]:
        """Return the next view, and how many targets of its fill contain its bytes once it is filled."""
        end = min(end, at + min(PIECE_BYTES, len(scratch)))
        if number < len(self._fills):
            straight, fill = self._straight[number], self._fills[number]
            if straight is not None and fill.start <= at:
                return straight[at - fill.start : min(end, fill.end) - fill.start], 1
        while number < len(self._fills) and self._fills[number].start < end:
            if self._straight[number] is not None and self._fills[number].start > at:
                end = self._fills[number].start
                break
            number += 1
        return scratch[: end - at], 0

    def _copy_to_targets(self, view: memoryview, start: int, end: int, *, first: int) -> None:
        """Copy bytes to the targets of their fills, except for the ``first`` ones of each."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for fill, low, high in self.within(start, end):
            for target in fill.targets[first:]:
                copy_bytes(target.data_ptr() + low - fill.start, source + low - start, high - low)


def digest_pieces(view: memoryview, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
    """Yield a view piece by piece, and add each to ``digest`` once it is filled."""
    for at in range(0, len(view), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        yield piece
        digest.update(piece)


def _memory(target: torch.Tensor) -> memoryview:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = target.numpy()
    return flat.data


def _overlapping(fills: Sequence[Fill]) -> set[int]:
    """Return the numbers of fills whose targets share memory with those of another fill."""
    ranges = sorted(
        (target.data_ptr(), target.data_ptr() + target.nbytes, number)
        for number, fill in enumerate(fills)
        for target in fill.targets
        if target.is_cpu
    )
    found: set[int] = set()
    last_end, owner = 0, -1
    for start, end, number in ranges:
        if start < last_end and number != owner:
            found |= {number, owner}
        if end > last_end:
            last_end, owner = end, number
    return found


# Targets on a device ------------------------------------------------------------------------------


GATHERED_FROM = 8
"""From this number of pieces on, a chunk's bytes are copied to the device in one copy, and distributed staged."""

Piece = tuple[torch.Tensor, int]
"""A flat target on a device, and the offset of its bytes in the chunk."""


class DeviceCopies:
    """The copies of one restore to devices, on streams of their own. Shared by the reading threads; the owner calls
    ``finish``.

    The caller's tensors need no ``Tensor.record_stream``: all work that was queued on their device has ended before the
    first copy, and ``finish`` waits for the last one. Targets in host memory are not copied here.
    """

    def __init__(self, fills: Sequence[Fill], pool: BufferPool, streams: Streams) -> None:
        """``pool`` lends the buffers that chunks are read into. Waits for all work on the targets' devices: the copy
        streams are not ordered with the caller's streams, or with others that use the targets."""
        self._pool = pool
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._held: list[torch.Tensor] = []
        for device in {t.device for fill in fills for t in fill.targets if not t.is_cpu}:
            synchronize(device)
            self._streams[device] = streams.of(device)

    def launch(
        self, device: torch.device, source: torch.Tensor, pieces: Sequence[Piece], buffer: Buffer
    ) -> None:
        """Queue the copies of a verified chunk ``source`` to its ``pieces`` on ``device``, in the chunk's order.

        ``buffer`` is the buffer of the read. If the chunk is in it, the buffer gets an event for the end of the copies.
        Other memory is kept alive, and must not change, until ``finish``. If this fails, no copy is in progress.
        """
        stream = self._streams[device]
        if stream is None:  # this kind of device has no copy stream
            _copy_each(source, pieces, non_blocking=False)
            return
        in_buffer = buffer.contains(source.data_ptr())
        if in_buffer:
            self._pool.lock_pages(buffer, device)
        else:
            self._held.append(source)
        try:
            event = stream.enqueue(lambda: _copy(source, pieces))
        except BaseException:
            stream.finish()  # a part may be queued
            raise
        if in_buffer:
            buffer.events.append(event)

    def finish(self) -> None:
        """Wait for the end of every copy, on all devices; raises the error of one that failed."""
        with ExitStack() as stack:
            for stream in self._streams.values():
                if stream is not None:
                    stack.callback(stream.finish)
        self._held.clear()


def _copy(source: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Queue copies on the current stream; many small ones through memory of the device, if it has room."""
    staged = _room_for(pieces) if len(pieces) >= GATHERED_FROM else None
    if staged is None:
        _copy_each(source, pieces, non_blocking=True)
        return
    first = pieces[0][1]
    with torch.inference_mode():
        _copy_cut(staged, source[first : first + staged.numel()], non_blocking=True)
        torch._foreach_copy_(
            [target for target, _ in pieces],
            [staged[start - first :][: target.numel()] for target, start in pieces],
        )


def _room_for(pieces: Sequence[Piece]) -> torch.Tensor | None:
    """Allocate device memory for the range from the first piece to the last; None if there is none.

    The memory belongs to the current stream: its next user runs after what is queued there now.
    """
    first, (last, start) = pieces[0][1], pieces[-1]
    try:
        return last.new_empty(start + last.numel() - first)
    except torch.OutOfMemoryError:
        return None


def _copy_each(source: torch.Tensor, pieces: Sequence[Piece], *, non_blocking: bool) -> None:
    with torch.inference_mode():  # inference tensors can be written only in this mode
        for target, start in pieces:
            _copy_cut(target, source[start : start + target.numel()], non_blocking=non_blocking)


def _copy_cut(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    """Copy flat bytes; those of an image in memory may be page-locked in part."""
    for start, end in cut_at(locked_bounds(), source.data_ptr(), source.numel()):
        target[start:end].copy_(source[start:end], non_blocking=non_blocking)
