"""Writing verified bytes of one rank's image into a file, chunk by chunk, through reused buffers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.copies.shard_reader import ShardReader
from tierfall.export.output import write_all
from tierfall.ops.commands import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Bytes ``start`` to ``end`` of an image, and where in the file each copy of them begins."""

    start: int
    end: int
    targets: tuple[int, ...]


def write_spans(
    job: ShardReader, spans: Sequence[FileSpan], descriptor: int, progress: Progress
) -> None:
    """Write spans of an image, which are in its order and do not overlap, to their places in a file.

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
                write_all(descriptor, view[low - start : high - start], target + low - span.start)
            written += high - low
        progress.add(written)

    job.read_chunks([i for i in range(manifest.chunk_count) if overlapping(i)], write)
