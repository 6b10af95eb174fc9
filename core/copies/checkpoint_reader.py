"""The images of all ranks of a checkpoint, opened for reading: of each its good copies and its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.copies.chunk_cache import ChunkCache
from tierfall.core.copies.chunk_reader import (
    BUFFER_BYTES,
    BufferRing,
    ChunkReader,
    ImageFills,
    ReadTally,
    chunks_of,
    read_fills,
)
from tierfall.core.copies.images import (
    READ_THREADS,
    Image,
    PackedImage,
    ReadableStore,
    RegionImage,
    StoredImage,
    checked_manifest,
    unpacked,
)
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.commit_files import image_file
from tierfall.core.format.records import Commit, Manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.load.build import Fill
from tierfall.core.runtime.buffers import allocate
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId, Shard

PASSABLE = (IntegrityError, BackendError, NotSupportedError)
"""Errors after which another copy is read; after damage (``is_damage``), an older step is tried, too. Any other error
ends a restore."""

NOWHERE = "no tier that answered on this rank has it"

OpenImage = Callable[[str, CheckpointId, Shard], Image]
Regions = Mapping[tuple[CheckpointId, Shard], HostRegion]
"""Sealed images in host memory."""


def image_opener(
    stores: Mapping[str, ReadableStore], memory: str = "", regions: Regions | None = None
) -> OpenImage:
    """Return a function that opens one copy of one image: from ``regions`` on the tier named ``memory``, else from its
    store."""

    def open_image(tier: str, id: CheckpointId, shard: Shard) -> Image:
        if tier != memory:
            return StoredImage(stores[tier], id, shard)
        region = (regions or {}).get((id, shard))
        if region is None:
            raise IntegrityError(
                f"{tier}: {id} left memory before it was read, or the shard of rank {shard.rank} is not in this memory"
            )
        return RegionImage(tier, region)

    return open_image


def _name_same_manifest(one: Commit | None, other: Commit, shard: Shard) -> bool:
    """Return whether two commit records name the same manifest of a shard, so that it is read once for both copies."""
    name = keys.manifest_name(shard)
    return one is not None and one.lineage == other.lineage and one.file(name) == other.file(name)


def names_others_only(commit: Commit, shard: Shard) -> bool:
    """Return whether a commit record is of a tier that has other shards of this checkpoint, but not this one."""
    image, manifest = image_file(commit, shard), commit.file(keys.manifest_name(shard))
    return bool(commit.files) and image is None and manifest is None


def find_images(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    shard: Shard,
    tally: ReadTally,
) -> tuple[list[Image], Manifest]:
    """Open the copies of a shard on ``tiers`` with good records, fastest first; return them with their manifest.

    Tiers whose commit record names only other shards are left out. Raises IntegrityError if there is no good copy, and
    the error of a copy that could not be read, if there is one.
    """
    images: list[Image] = []
    manifest: Manifest | None = None
    manifest_commit: Commit | None = None
    failures: list[TierfallError] = []
    for tier in tiers:
        found = checkpoint.copies[tier]
        if found.commit is not None and names_others_only(found.commit, shard):
            continue
        try:
            if found.commit is None:
                raise found.damage or IntegrityError(f"{tier}: no commit record")
            image = open_image(tier, checkpoint.id, shard)
            if manifest is not None and not _name_same_manifest(
                manifest_commit, found.commit, shard
            ):
                raise IntegrityError(
                    f"{tier}: holds another snapshot of {checkpoint.id} than faster tiers"
                )
            try:
                if manifest is None:
                    manifest, manifest_commit = (
                        checked_manifest(image, found.commit, shard),
                        found.commit,
                    )
                image = unpacked(image, found.commit, manifest)
            except TierfallError as error:
                tally.note_damage(tier, checkpoint.id, error)
                raise
        except PASSABLE as error:
            failures.append(error)
            tally.add_skipped(f"{checkpoint.id} on {tier}", error, checkpoint.id)
            continue
        images.append(image)
    if manifest is None or not images:
        raise next((e for e in failures if not e.is_damage), None) or IntegrityError(
            f"no copy of {checkpoint.id} has good records: "
            + ("; ".join(map(str, failures)) or NOWHERE)
        )
    return images, manifest


@dataclass(slots=True)
class CheckpointReader:
    """Opens images on first use, and reads for this rank only.

    Stored chunks are read through ``ring``; without it through buffers of this reader until ``close``, for at most
    ``chunks_max`` chunks, if given. ``touched``: targets may have been written to. ``cache`` keeps chunks of slower
    tiers.
    """

    checkpoint: KnownCheckpoint
    tiers: Sequence[str]
    open_image: OpenImage
    tally: ReadTally
    ring: BufferRing | None = None
    chunks_max: int | None = None
    touched: bool = False
    cache: ChunkCache | None = None
    _own: BufferRing | None = None
    _found: dict[int, tuple[list[Image], Manifest] | TierfallError] = field(default_factory=dict)
    _locks: dict[int, threading.Lock] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint; 1 without a record, as then nothing of it can be read."""
        commit = self.checkpoint.commit
        return 1 if commit is None else commit.world_size

    def header(self, rank: int) -> ImageHeader:
        """Read the header of one rank's image; raises one of PASSABLE if it cannot be read."""
        manifest, data = self.find(rank)[1], self.header_bytes(rank)
        what = f"checkpoint {manifest.lineage.checkpoint}"
        return read_header(data, image_bytes=manifest.image_bytes, what=what)

    def header_bytes(self, rank: int) -> memoryview:
        """Read the bytes of that header."""
        reader = self._reader(rank)
        return reader.read(0, allocate(reader.manifest.data_start))

    def headers(self, ranks: Iterable[int]) -> dict[int, ImageHeader]:
        """Read the headers of the images of ``ranks``, without numbers that are not ranks; raises as ``header``
        does."""
        known = [rank for rank in sorted(ranks) if rank < self.world_size]
        read = run_in_parallel(self.header, known, parallel=READ_THREADS)
        return dict(zip(known, read, strict=True))

    def manifests(self, ranks: Iterable[int]) -> dict[int, Manifest]:
        """Return the manifests of the images of ``ranks``; raises as ``header`` does."""
        return {rank: self.find(rank)[1] for rank in sorted(ranks)}

    def fill(self, fills: Mapping[int, Sequence[Fill]]) -> None:
        """Fill the targets of the ``fills`` of each rank's image."""
        self.touched = True
        self.fill_here(fills)

    def fill_here(self, fills: Mapping[int, Sequence[Fill]]) -> None:
        """Fill memory of this process on this rank only, without the other ranks."""
        parts = {rank: self.part(rank, those) for rank, those in sorted(fills.items())}
        wanted = {rank: chunks_of(part.reader.manifest, part.fills) for rank, part in parts.items()}
        self.read(parts, [(rank, index) for rank, indexes in wanted.items() for index in indexes])

    def part(self, rank: int, fills: Sequence[Fill]) -> ImageFills:
        """Return what is filled from one rank's image, and how it is read."""
        return ImageFills(self._reader(rank), fills)

    def _reader(self, rank: int) -> ChunkReader:
        return ChunkReader(*self.find(rank), self.tally, self.cache)

    def read(
        self,
        parts: Mapping[int, ImageFills],
        chunks: Sequence[tuple[int, int]],
        *,
        threads_max: int = 0,
        order: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Fill from ``chunks``, as ``read_fills`` does; on up to ``threads_max`` threads, in that ``order``, if they
        wait for other ranks."""
        if not chunks:
            return
        largest = max(part.reader.manifest.chunk_bytes for part in parts.values())
        if self.ring is None:
            self.ring = self._own = BufferRing(largest, count_max=self.chunks_max)
        ring, images = self.ring, [i for part in parts.values() for i in part.reader.images]
        if all(image.in_memory for image in images):
            threads = ring.threads
        else:
            threads = max(1, min(READ_THREADS, BUFFER_BYTES // largest))
        if self.chunks_max is not None:  # a packed chunk takes two
            each = 2 if any(isinstance(image, PackedImage) for image in images) else 1
            threads = max(1, min(threads, self.chunks_max // each))
        if any(not t.is_cpu for part in parts.values() for f in part.fills for t in f.targets):
            threads = max(threads, min(ring.count - 1, ring.threads))
        if threads_max:
            threads = max(1, min(threads_max, ring.count, 2 * BUFFER_BYTES // largest))
        ranges = (parts[key].reader.manifest.chunk_range(index) for key, index in chunks)
        self.tally.on_planned(sum(end - start for start, end in ranges))
        order = chunks if order is None else order
        read_fills(parts, order, threads, ring.pool, ring.streams, self.tally.on_bytes)

    def close(self) -> None:
        """End the reading of this checkpoint, on which all ranks have agreed."""
        if self._own is not None:
            self._own.release()

    def find(self, rank: int) -> tuple[list[Image], Manifest]:
        """Open the good copies of one rank's image; raises what ``find_images`` raised at the first call."""
        with self._locks.setdefault(rank, threading.Lock()):
            if rank not in self._found:
                where, shard = (self.tiers, self.open_image), Shard(rank, self.world_size)
                try:
                    self._found[rank] = find_images(self.checkpoint, *where, shard, self.tally)
                except PASSABLE as error:
                    self._found[rank] = error
            found = self._found[rank]
        if isinstance(found, TierfallError):
            raise found
        return found
