"""The images of all ranks of one checkpoint, as one rank reads them: headers first, and then what it needs of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfall.core.copies.buffer_ring import BufferRing
from tierfall.core.copies.cached_reads import WrittenTargets
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.images import Image
from tierfall.core.copies.shard_reader import NOWHERE, OpenImage, ShardReader, find_images
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.format.records import Manifest
from tierfall.core.image.header import ImageHeader
from tierfall.core.load.build import Fill
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.values import Shard


@dataclass(slots=True)
class CheckpointReader:
    """Opens images when they are needed, and reads for this rank alone. ``nowhere`` says what is wrong where no tier
    holds one; ``touched``: targets may have been written to, and ``written`` which."""

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
        """How many ranks saved it."""
        commit = self.checkpoint.commit
        return ours if commit is None else commit.world_size

    def header(self, shard: Shard) -> ImageHeader:
        """Read the header of one rank's image; raises one of PASSABLE where that cannot be had."""
        return self.header_here(shard)

    def header_here(self, shard: Shard) -> ImageHeader:
        """Read a header, whatever other ranks do; raises as ``header`` does."""
        with self.open(shard) as job:
            return job.read_header()

    def headers(self, world_size: int) -> dict[int, ImageHeader]:
        """Read the headers of all ranks' images; raises as ``header`` does."""
        return {rank: self.header(Shard(rank, world_size)) for rank in range(world_size)}

    def headers_here(self, world_size: int) -> dict[int, ImageHeader]:
        """Read the headers of all ranks' images, whatever other ranks do; raises as ``header`` does."""
        return {rank: self.header_here(Shard(rank, world_size)) for rank in range(world_size)}

    def manifest(self, shard: Shard) -> Manifest:
        """Return the manifest of an image whose header was read."""
        return self._found[shard][1]

    def manifests(self, ranks: Iterable[int], world_size: int) -> dict[int, Manifest]:
        """Return the manifests of several ranks' images; what is no rank is left out. Raises as ``header`` does."""
        shards = (Shard(rank, world_size) for rank in sorted(ranks) if rank < world_size)
        return {shard.rank: self.find(shard)[1] for shard in shards}

    def fill(self, fills: Mapping[int, Sequence[Fill]], world_size: int) -> None:
        """Bring to their targets the ``fills`` of each rank's image."""
        self.touched = True
        for rank, those in sorted(fills.items()):
            with self.open(Shard(rank, world_size)) as job:
                job.fill(those, self.written)

    def give_up(self, error: BaseException) -> TierfallError | None:
        """Note that this rank comes no further, for ``error``; return what keeps other ranks from being told so."""
        return None

    def open(self, shard: Shard) -> ShardReader:
        """Open one rank's image to be read; raises as ``header`` does."""
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
