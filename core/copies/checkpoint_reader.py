"""The images of all ranks of one checkpoint, for reading by one rank: all headers first, then the bytes that it
needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfall.core.copies.cached_reads import WrittenTargets
from tierfall.core.copies.chunk_reader import BufferRing, ReadTally
from tierfall.core.copies.images import READ_THREADS, Image
from tierfall.core.copies.shard_reader import NOWHERE, OpenImage, ShardReader, find_images
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader
from tierfall.core.load.build import Fill
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import Shard


@dataclass(slots=True)
class CheckpointReader:
    """Opens images on first use, and reads for this rank only.

    ``nowhere`` is the reason for the error where no tier has an image. ``touched``: targets may have been written to;
    ``written`` records which.
    """

    checkpoint: KnownCheckpoint
    tiers: Sequence[str]
    open_image: OpenImage
    tally: ReadTally
    ring: BufferRing | None
    chunks_max: int | None
    nowhere: str = NOWHERE
    touched: bool = False
    written: WrittenTargets = field(default_factory=WrittenTargets)
    _found: dict[Shard, tuple[list[Image], Manifest]] = field(default_factory=dict)

    def world_size(self, ours: int) -> int:
        """Return the number of ranks that saved the checkpoint; ``ours`` where that is unknown."""
        commit = self.checkpoint.commit
        return ours if commit is None else commit.world_size

    def header(self, shard: Shard) -> ImageHeader:
        """Read the header of one rank's image; raises one of PASSABLE if it cannot be read."""
        return self.header_here(shard)

    def header_here(self, shard: Shard) -> ImageHeader:
        """Read a header on this rank only, without the other ranks; raises as ``header`` does."""
        with self.open(shard) as reader:
            return reader.read_header()

    def headers(self, world_size: int) -> dict[int, ImageHeader]:
        """Read the headers of all ranks' images; raises as ``header`` does."""
        shards = [Shard(rank, world_size) for rank in range(world_size)]
        read = run_in_parallel(self.header_here, shards, parallel=READ_THREADS)
        return dict(enumerate(read))

    def manifest(self, shard: Shard) -> Manifest:
        """Return the manifest of an image whose header has been read."""
        return self._found[shard][1]

    def manifests(self, ranks: Iterable[int], world_size: int) -> dict[int, Manifest]:
        """Return the manifests of the images of ``ranks``, without numbers that are not ranks. Raises as ``header``
        does."""
        shards = (Shard(rank, world_size) for rank in sorted(ranks) if rank < world_size)
        return {shard.rank: self.find(shard)[1] for shard in shards}

    def fill(self, fills: Mapping[int, Sequence[Fill]], world_size: int) -> None:
        """Fill the targets of the ``fills`` of each rank's image."""
        self.touched = True
        self.fill_here(fills, world_size, self.written)

    def fill_here(
        self,
        fills: Mapping[int, Sequence[Fill]],
        world_size: int,
        written: WrittenTargets | None = None,
    ) -> None:
        """Fill memory of this process on this rank only, without the other ranks; ``written`` records targets in the
        state."""
        for rank, image_fills in sorted(fills.items()):
            with self.open(Shard(rank, world_size)) as reader:
                reader.fill(image_fills, written or WrittenTargets())

    def give_up(self, error: BaseException) -> TierfallError | None:
        """Record that this rank has failed with ``error``; return the error that prevents telling the other ranks, or
        None."""
        return None

    def open(self, shard: Shard) -> ShardReader:
        """Open one rank's image for reading; raises as ``header`` does."""
        images, manifest = self.find(shard)
        return ShardReader(images, manifest, self.tally, self.ring, self.chunks_max)

    def find(self, shard: Shard) -> tuple[list[Image], Manifest]:
        """Open the good copies of one rank's image; raises as ``find_images`` does."""
        if shard not in self._found:
            self._found[shard] = find_images(
                self.checkpoint,
                self.tiers,
                self.open_image,
                shard,
                self.tally,
                nowhere=self.nowhere,
            )
        return self._found[shard]
