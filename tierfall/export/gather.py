"""One checkpoint of any number of ranks as one state: a merged header, and whole tensors, written into a file.

Bytes are copied from the ranks' images to their offsets in the file; each chunk is verified first. A tensor block that
is a contiguous range of its tensor is written from the buffer of a chunk, of which there are two. Others (columns) are
assembled in memory first, some rows at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierfall.backends.posix.system import write_whole
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import CheckpointReader, OpenImage, ShardReader
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import MergedHeader, TensorBlock, merge_headers
from tierfall.core.image.per_rank import TensorPair, separate_per_rank
from tierfall.core.image.tree import ConflictNode, leaves, positions_of
from tierfall.core.load.build import BlockTarget, Fill
from tierfall.core.restore.reshard import BlockReads
from tierfall.core.types.errors import IntegrityError, RestoreError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.export.options import CAST
from tierfall.export.structure import StatePart
from tierfall.ops.commands import Progress, Watch

CHUNKS_MAX = 2
"""How many chunks may be in memory at once."""
ROWS_BYTES = 128 << 20
"""The most that is assembled in memory at once, or one row if that is larger."""
COMPARED_BYTES = 16 << 20
"""The most that is compared between two ranks at once."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``first`` to ``first + count`` of a tensor."""

    position: int
    first: int
    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCheckpoint:
    """One checkpoint, merged over its ranks. ``own`` is the name below which entries of single ranks are that differ
    from rank 0's, if there are any."""

    run: str
    id: CheckpointId
    merged: MergedHeader
    images: CheckpointReader
    world_size: int
    own: str | None
    tally: ReadTally
    watch: Watch

    @property
    def header(self) -> ImageHeader:
        return self.merged.header

    def check(self, parts: Sequence[StatePart]) -> None:
        """Raise RestoreError for a part that differs among the ranks, or is incomplete."""
        for part in parts:
            for name, leaf in leaves(part.node, part.name):
                if isinstance(leaf, ConflictNode):
                    raise RestoreError(f"{self.header.what}: {name}: {leaf.reason}")
        for position in positions_in(parts):
            stored, blocks = self.header.tensors[position], self.merged.blocks[position]
            if sum(block.end - block.start for block in blocks) < stored.length:
                raise RestoreError(f"{self.header.what}: {stored.name}: it is incomplete")

    def open(self, rank: int) -> ShardReader:
        """Open the image of one rank."""
        return self.images.open(Shard(rank, self.world_size))

    def write_image(self, job: ShardReader, descriptor: int) -> None:
        """Write the image of a single rank unchanged. Raises as ``write`` does."""
        length = job.manifest.image_bytes
        span = FileSpan(start=0, end=length, targets=(0,))
        _write_spans(job, [span], descriptor, Progress(self.watch, length))

    def write(
        self,
        places: Mapping[int, Sequence[int]],
        descriptor: int,
        *,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write tensors into a file; ``places`` has the offsets at which each begins, one or more.

        Tensors of floating-point numbers are converted to ``dtype``. Raises as ``ChunkReader.read`` does, and OSError.
        """
        other = frozenset() if dtype is None else CAST - {dtype}
        cast = [p for p in places if self.header.tensors[p].dtype in other]
        cut = [*cast, *(p for p in places.keys() - cast if self._is_cut(p))]
        progress = progress or self.progress(places)
        spans: dict[int, list[FileSpan]] = defaultdict(list)
        for position in places.keys() - cut:
            for block in self.merged.blocks[position]:
                if block.end > block.start:
                    spans[block.rank].append(self._span(position, block, places[position]))
        for rank, those in sorted(spans.items()):
            with self.open(rank) as job:
                base = job.manifest.data_start
                moved = [
                    FileSpan(start=base + s.start, end=base + s.end, targets=s.targets)
                    for s in sorted(those, key=lambda span: span.start)
                ]
                _write_spans(job, moved, descriptor, progress)
        for batch in self._batches(cut):
            self._write_rows(batch, places, descriptor, progress, dtype)

    def progress(self, positions: Iterable[int]) -> Progress:
        """Return what counts the bytes of these tensors, as stored."""
        return Progress(self.watch, sum(self.header.tensors[p].length for p in positions))

    def _span(self, position: int, block: TensorBlock, starts: Sequence[int]) -> FileSpan:
        """Return source and targets of a block that is a contiguous range of its tensor."""
        before = block.offset[0] * self._row_bytes(position) if block.offset else 0
        targets = tuple(start + before for start in starts)
        return FileSpan(start=block.start, end=block.end, targets=targets)

    def _write_rows(
        self,
        batch: Sequence[_Rows],
        places: Mapping[int, Sequence[int]],
        descriptor: int,
        progress: Progress,
        dtype: torch.dtype | None,
    ) -> None:
        """Assemble rows in memory, and write them, those of floating-point numbers as ``dtype``."""
        shapes = [self.header.tensors[rows.position].shape for rows in batch]
        targets = [
            BlockTarget(
                position=rows.position,
                target=torch.empty(rows.bytes, dtype=torch.uint8),
                offset=(rows.first, *(0 for _ in shape[1:])) if shape else (),
                lengths=(rows.count, *shape[1:]) if shape else (),
            )
            for rows, shape in zip(batch, shapes, strict=True)
        ]
        reads = BlockReads(self.merged, targets)
        self.images.fill_here(reads.fills, self.world_size)
        reads.finish()
        for rows, block in zip(batch, targets, strict=True):
            data, stored = block.target, self.header.tensors[rows.position].dtype
            if dtype is not None and stored in CAST:
                data = data.view(stored).to(dtype).view(torch.uint8)
            before = rows.first * (data.numel() // rows.count)
            for start in places[rows.position]:
                write_whole(descriptor, data.numpy().data, start + before)
            progress.add(rows.bytes)

    def _batches(self, positions: Sequence[int]) -> Iterator[list[_Rows]]:
        batch: list[_Rows] = []
        for position in positions:
            row, first = self._row_bytes(position), 0
            left = (self.header.tensors[position].shape or (1,))[0] if row else 0
            while left:
                room = ROWS_BYTES - sum(rows.bytes for rows in batch)
                if batch and room < row:
                    yield batch
                    batch = []
                    continue
                count = min(left, max(1, room // row))
                batch.append(_Rows(position, first, count, count * row))
                first, left = first + count, left - count
        if batch:
            yield batch

    def _row_bytes(self, position: int) -> int:
        stored = self.header.tensors[position]
        return stored.length // (stored.shape or (1,))[0] if stored.length else 0

    def _is_cut(self, position: int) -> bool:
        """Return whether some block of a tensor is not a contiguous range of it."""
        stored = self.header.tensors[position]
        blocks = self.merged.blocks[position]
        return stored.length > 0 and any(b.lengths[1:] != stored.shape[1:] for b in blocks)


def gather(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage, watch: Watch
) -> MergedCheckpoint:
    """Read the headers of all ranks from ``tiers``, fastest first, and merge them, rank 0's values first.

    Raises as ``find_images`` and ``ChunkReader.read`` do.
    """
    commit = checkpoint.commit
    if commit is None:
        raise checkpoint.unread or IntegrityError(
            f"export: every commit record of {checkpoint.id} is damaged"
        )
    tally = ReadTally()
    images = CheckpointReader(checkpoint, tiers, open_image, tally, None, CHUNKS_MAX)
    world_size = commit.world_size
    headers, own = separate_per_rank(
        images.headers(world_size),
        lambda rank, pairs: _differing(images, Shard(rank, world_size), pairs),
    )
    of = f" of {world_size} ranks" if world_size > 1 else ""
    merged = merge_headers(headers, what=f"{checkpoint.id}{of}", own=0)
    return MergedCheckpoint(
        run=commit.lineage.run,
        id=checkpoint.id,
        merged=merged,
        images=images,
        world_size=world_size,
        own=own if any(key == own for key, _ in merged.header.tree.entries) else None,
        tally=tally,
        watch=watch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Bytes ``start`` to ``end`` of an image, and the offsets in the file at which they are written."""

    start: int
    end: int
    targets: tuple[int, ...]


def _write_spans(
    job: ShardReader, spans: Sequence[FileSpan], descriptor: int, progress: Progress
) -> None:
    """Write spans of an image, sorted and disjoint, to their offsets in a file.

    Raises as ``ChunkReader.read`` does, and OSError.
    """
    manifest, ends = job.manifest, [span.end for span in spans]

    def overlapping(index: int) -> Sequence[FileSpan]:
        start, end = manifest.chunk_range(index)
        first = stop = bisect_right(ends, start)
        while stop < len(spans) and spans[stop].start < end:
            stop += 1
        return spans[first:stop]

    def write(index: int, view: memoryview) -> None:
        start, end = manifest.chunk_range(index)
        written = 0
        for span in overlapping(index):
            low, high = max(start, span.start), min(end, span.end)
            for target in span.targets:
                write_whole(descriptor, view[low - start : high - start], target + low - span.start)
            written += high - low
        progress.add(written)

    job.read_chunks([i for i in range(manifest.chunk_count) if overlapping(i)], write)


# Comparing ranks -------------------------------------------------------------------------------------


Slice = tuple[TensorPair, int, int]
"""Bytes of two tensors, from the first of these to the second."""


def _differing(
    images: CheckpointReader, own: Shard, pairs: Sequence[TensorPair]
) -> frozenset[TensorPair]:
    """Return the pairs whose bytes differ. Equal digests of their chunks prove equality; other pairs are read."""
    first = Shard(0, own.world_size)
    slices: list[Slice] = [
        (pair, at, min(at + COMPARED_BYTES, pair.own.length))
        for pair in dict.fromkeys(pairs)
        if _digests(images, own, pair.own) != _digests(images, first, pair.first)
        for at in range(0, pair.own.length, COMPARED_BYTES)
    ]
    slices.sort(key=lambda piece: piece[0].own.start + piece[1])
    found: set[TensorPair] = set()
    for batch in _together(slices):
        ours = [(p.own.start + low, p.own.start + high) for p, low, high in batch]
        theirs = [(p.first.start + low, p.first.start + high) for p, low, high in batch]
        read = zip(batch, _read(images, own, ours), _read(images, first, theirs), strict=True)
        found.update(pair for (pair, *_), one, other in read if not torch.equal(one, other))
    return frozenset(found)


def _together(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Divide slices into those that are read at once: neighbours share chunks."""
    batch: list[Slice] = []
    size = 0
    for each in slices:
        length = each[2] - each[1]
        if batch and size + length > COMPARED_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += length
    if batch:
        yield batch


def _digests(
    images: CheckpointReader, shard: Shard, tensor: StoredTensor
) -> tuple[int, int, tuple[str, ...]]:
    """Return an identity of a tensor's bytes: its offset, and the digests of the chunks around it."""
    _, manifest = images.find(shard)
    low, high = tensor.start // manifest.chunk_bytes, (tensor.end - 1) // manifest.chunk_bytes
    return tensor.start, manifest.chunk_bytes, manifest.digests[1 + low : 2 + high]


def _read(
    images: CheckpointReader, shard: Shard, ranges: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    read = {span: torch.empty(span[1] - span[0], dtype=torch.uint8) for span in sorted(set(ranges))}
    fills = [Fill(start=s, end=e, targets=(t,)) for (s, e), t in read.items()]
    images.fill_here({shard.rank: fills}, shard.world_size)
    return [read[span] for span in ranges]


def positions_in(parts: Sequence[StatePart]) -> list[int]:
    return sorted({position for part in parts for position in positions_of(part.node)})
