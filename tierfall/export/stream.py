"""Streaming verified bytes of one image into a file: a chunk is read, checked, written, and its buffer used again."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.copies.chunk_reader import ChunkReader, Tally, count_threads, in_threads
from tierfall.core.copies.shard_reader import OpenImage, find_images
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader, read_header
from tierfall.core.image.raw_files import refuse_files
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.types.errors import IntegrityError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.export.output import write_all
from tierfall.ops.commands import Watch

CHUNKS_MAX = 2
"""How many chunks may lie in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes ``start`` to ``end`` of an image, and where in the file each copy of them begins."""

    start: int
    end: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The image of a checkpoint of one rank, as its good copies hold it."""

    run: str
    id: CheckpointId
    manifest: Manifest
    header: ImageHeader
    reader: ChunkReader
    tally: Tally
    threads: int
    pool: BufferPool
    watch: Watch

    @classmethod
    @contextmanager
    def open(
        cls,
        checkpoint: KnownCheckpoint,
        tiers: Sequence[str],
        open_image: OpenImage,
        watch: Watch,
    ) -> Iterator[Self]:
        """Open the copies on ``tiers`` and read the header; raises as ``find_images`` and ``ChunkReader.read`` do."""
        commit = checkpoint.commit
        if commit is None:
            raise IntegrityError(f"export: every commit record of {checkpoint.id} is damaged")
        tally = Tally()
        images, manifest = find_images(checkpoint, tiers, open_image, Shard(0, 1), tally)
        reader = ChunkReader(images, manifest, tally)
        threads = count_threads(manifest, images, CHUNKS_MAX)
        pool = BufferPool(bytes=frame_bytes_max(manifest.chunk_bytes), count=threads)
        with pool.take(manifest.data_start) as buffer:
            header = read_header(
                reader.read(0, buffer),
                image_bytes=manifest.image_bytes,
                what=f"header of {checkpoint.id}",
            )
        refuse_files(header, doing="export")
        yield cls(
            run=commit.line.run,
            id=checkpoint.id,
            manifest=manifest,
            header=header,
            reader=reader,
            tally=tally,
            threads=threads,
            pool=pool,
            watch=watch,
        )


def pour(source: Source, spans: Sequence[Span], descriptor: int) -> None:
    """Write spans of an image, which stand in its order and do not overlap, to their places in a file."""
    manifest, ends = source.manifest, [span.end for span in spans]
    wanted = [
        index
        for index in range(manifest.chunk_count)
        if _overlapping(*manifest.chunk_range(index), spans, ends)
    ]
    total = sum(end - start for start, end in map(manifest.chunk_range, wanted))
    progress, done = threading.Lock(), 0

    def write(index: int) -> None:
        nonlocal done
        start, end = manifest.chunk_range(index)
        with source.pool.take(end - start) as buffer:
            view = source.reader.read(index, buffer)
            for span in _overlapping(start, end, spans, ends):
                low, high = max(start, span.start), min(end, span.end)
                for target in span.targets:
                    write_all(
                        descriptor, view[low - start : high - start], target + low - span.start
                    )
        with progress:
            done += end - start
            source.watch(done, total)

    in_threads(source.threads, write, wanted)


def _overlapping(
    start: int, end: int, spans: Sequence[Span], ends: Sequence[int]
) -> Sequence[Span]:
    first = stop = bisect_right(ends, start)
    while stop < len(spans) and spans[stop].start < end:
        stop += 1
    return spans[first:stop]
