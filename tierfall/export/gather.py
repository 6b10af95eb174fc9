"""The parts of all ranks of one checkpoint as one: a merged header, and its whole tensors brought into a mapped file.

Bytes go from the ranks' images to their places in the file, each chunk verified before; what is read aside on the way,
where a block is no run of its whole, is bounded. Beside that no more memory is taken than two chunks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierfall.core.copies.checkpoint_reader import Parts
from tierfall.core.copies.chunk_reader import Tally
from tierfall.core.copies.shard_reader import OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.merge import Merged, merge_headers
from tierfall.core.image.per_rank import Pair, set_aside
from tierfall.core.image.raw_files import refuse_files
from tierfall.core.image.tree import ConflictNode, leaves, slots_of
from tierfall.core.load.build import Fill, Want
from tierfall.core.restore.reshard_reads import spread
from tierfall.core.types import keys
from tierfall.core.types.errors import IntegrityError, RestoreError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.export.select import Part
from tierfall.export.stream import CHUNKS_MAX
from tierfall.ops.commands import Watch

ASIDE_BYTES = 256 << 20
"""So much may be read aside at once, or one tensor if that is larger."""
COMPARED_BYTES = 16 << 20
"""So much of what ranks have under one name is compared at once."""


class RankParts:
    """The images of all ranks, each opened from the tiers whose records name it."""

    def __init__(
        self,
        checkpoint: KnownCheckpoint,
        world_size: int,
        tiers: Sequence[str],
        open_image: OpenImage,
        tally: Tally,
    ) -> None:
        named = {tier: _shards_on(checkpoint, tier) for tier in tiers}
        self._shards = [Shard(rank, world_size) for rank in range(world_size)]
        self._parts = [
            Parts(
                checkpoint,
                [t for t in tiers if (on := named[t]) is None or shard in on],
                open_image,
                tally,
                None,
                CHUNKS_MAX,
            )
            for shard in self._shards
        ]

    def headers(self) -> dict[int, ImageHeader]:
        pairs = zip(self._shards, self._parts, strict=True)
        return {shard.rank: parts.header(shard) for shard, parts in pairs}

    def fill(self, rank: int, fills: Sequence[Fill]) -> None:
        self._parts[rank].fill({rank: fills}, len(self._shards))

    def chunk_digests(self, rank: int, start: int, end: int) -> tuple[int, int, tuple[str, ...]]:
        """Return what tells bytes of an image apart, by the digests of the chunks that they lie in."""
        manifest = self._parts[rank].manifest(self._shards[rank])
        low, high = start // manifest.chunk_bytes, (end - 1) // manifest.chunk_bytes
        return start, manifest.chunk_bytes, manifest.digests[1 + low : 2 + high]


def _shards_on(checkpoint: KnownCheckpoint, tier: str) -> frozenset[Shard | None] | None:
    """Return whose images a tier has; None where its record is damaged, which is told when it is read."""
    commit = checkpoint.copies[tier].commit
    if commit is None:
        return None
    return frozenset(keys.parse_shard(file.name) for file in commit.files if file.digest is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """One checkpoint, merged over its ranks. ``own`` is the name below which stands what single ranks have otherwise
    than rank 0, where there is such."""

    run: str
    id: CheckpointId
    merged: Merged
    parts: RankParts
    own: str | None
    tally: Tally
    watch: Watch

    @property
    def header(self) -> ImageHeader:
        return self.merged.header

    def check(self, parts: Sequence[Part]) -> None:
        """Raise RestoreError where the ranks do not have one of these parts alike, or not all of it."""
        for part in parts:
            for name, leaf in leaves(part.node, part.name):
                if isinstance(leaf, ConflictNode):
                    raise RestoreError(f"{self.header.what}: {name}: {leaf.reason}")
        for slot in slots_in(parts):
            stored, blocks = self.header.tensors[slot], self.merged.blocks[slot]
            if sum(block.end - block.start for block in blocks) < stored.length:
                raise RestoreError(f"{self.header.what}: {stored.name}: it is not there whole")

    def fill(self, wants: Sequence[Want]) -> None:
        """Bring every tensor that is wanted to its targets. Raises as ``ChunkReader.read`` does."""
        total = sum(len(want.target) for want in wants)
        done = 0
        for some in self._batches(wants):
            reads = spread(self.merged, some, same=())
            for rank, fills in sorted(reads.fills.items()):
                self.parts.fill(rank, fills)
                done += sum((f.end - f.start) * len(f.targets) for f in fills)
                self.watch(min(done, total), total)
            reads.finish()

    def _batches(self, wants: Sequence[Want]) -> Iterator[list[Want]]:
        batch: list[Want] = []
        aside = 0
        for want in wants:
            size = len(want.target) if self._is_cut(want.slot) else 0
            if batch and aside + size > ASIDE_BYTES:
                yield batch
                batch, aside = [], 0
            batch.append(want)
            aside += size
        if batch:
            yield batch

    def _is_cut(self, slot: int) -> bool:
        """Say whether some block of a tensor is no run of the whole, so that it is read aside."""
        shape = self.header.tensors[slot].shape
        return any(block.lengths[1:] != shape[1:] for block in self.merged.blocks[slot])


def gather(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage, watch: Watch
) -> Gathered:
    """Read the headers of all ranks from ``tiers``, fastest first, and merge them, rank 0's values first.

    Raises as ``find_images`` and ``ChunkReader.read`` do.
    """
    commit = checkpoint.commit
    if commit is None:
        raise IntegrityError(f"export: every commit record of {checkpoint.id} is damaged")
    tally = Tally()
    parts = RankParts(checkpoint, commit.world_size, tiers, open_image, tally)
    found = parts.headers()
    for header in found.values():
        refuse_files(header, doing="export")
    headers, own = set_aside(found, lambda rank, pairs: _differing(parts, rank, pairs))
    what = f"{checkpoint.id} of {commit.world_size} ranks"
    merged = merge_headers(headers, what=what, own=0)
    return Gathered(
        run=commit.line.run,
        id=checkpoint.id,
        merged=merged,
        parts=parts,
        own=own if any(key == own for key, _ in merged.header.tree.entries) else None,
        tally=tally,
        watch=watch,
    )


# What ranks have alike -------------------------------------------------------------------------------


def _differing(parts: RankParts, rank: int, pairs: Sequence[Pair]) -> frozenset[Pair]:
    """Return the pairs whose bytes differ. Those in chunks of the same digests are the same; others are read."""
    found: set[Pair] = set()
    slices: list[tuple[Pair, int, int]] = []
    for pair in dict.fromkeys(pairs):
        own, first = pair
        if parts.chunk_digests(rank, own.start, own.end) != parts.chunk_digests(
            0, first.start, first.end
        ):
            for at in range(0, own.length, COMPARED_BYTES):
                slices.append((pair, at, min(at + COMPARED_BYTES, own.length)))
    slices.sort(key=lambda piece: piece[0].own.start + piece[1])
    while slices:
        batch, size = [slices.pop(0)], 0
        size = batch[0][2] - batch[0][1]
        while slices and size + slices[0][2] - slices[0][1] <= COMPARED_BYTES:
            size += slices[0][2] - slices[0][1]
            batch.append(slices.pop(0))
        found |= _compare(parts, rank, batch)
    return frozenset(found)


def _compare(parts: RankParts, rank: int, batch: Sequence[tuple[Pair, int, int]]) -> set[Pair]:
    """Read slices of both ranks, and return the pairs whose slices differ."""
    ones = _read(
        parts, rank, [(pair.own.start + low, pair.own.start + high) for pair, low, high in batch]
    )
    others = _read(
        parts, 0, [(pair.first.start + low, pair.first.start + high) for pair, low, high in batch]
    )
    return {
        pair
        for (pair, _, _), one, other in zip(batch, ones, others, strict=True)
        if not torch.equal(one, other)
    }


def _read(parts: RankParts, rank: int, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    read = {span: torch.empty(span[1] - span[0], dtype=torch.uint8) for span in sorted(set(ranges))}
    parts.fill(rank, [Fill(name="", start=s, end=e, targets=(t,)) for (s, e), t in read.items()])
    return [read[span] for span in ranges]


# Into a file -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Slots, and where in a mapped file the bytes of each begin; more than once where they are wanted so often."""

    mapping: mmap.mmap
    places: Mapping[int, Sequence[int]]

    def flat(self, gathered: Gathered, slot: int, number: int = 0) -> torch.Tensor:
        """Return the memory of a slot's bytes as a storage of its own: torch.save writes whole storages."""
        length = gathered.header.tensors[slot].length
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        at = self.places[slot][number]
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=length, offset=at)


def place_file(
    gathered: Gathered, descriptor: int, places: Mapping[int, Sequence[int]], length: int
) -> Placed:
    """Bring tensors to their places in a file of ``length`` bytes, and return it mapped.

    Its room is taken before: a page that finds none later would end the process.
    """
    if length:
        os.posix_fallocate(descriptor, 0, length)
    mapping = mmap.mmap(descriptor if length else -1, max(length, 1))
    placed = Placed(mapping=mapping, places=places)
    gathered.fill(
        [
            Want(slot=slot, target=placed.flat(gathered, slot, number))
            for slot in sorted(places)
            for number in range(len(places[slot]))
            if gathered.header.tensors[slot].length
        ]
    )
    return placed


def place_aside(gathered: Gathered, slots: Sequence[int], beside: Path) -> Placed:
    """Bring tensors into a file without a name, which goes with its mapping; each begins at a multiple of 64 bytes."""
    places, end = {}, 0
    for slot in slots:
        places[slot] = (end,)
        end += -(-gathered.header.tensors[slot].length // 64) * 64
    path = beside.with_name(f"{beside.name}.image")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()  # whatever happens
        return place_file(gathered, descriptor, places, end)
    finally:
        os.close(descriptor)


def slots_in(parts: Sequence[Part]) -> list[int]:
    return sorted({slot for part in parts for slot in slots_of(part.node)})
