"""Resharding: a checkpoint of other ranks, or of another layout, into what this rank holds.

A rank that finds its own part laid out as it holds it reads that and nothing else. Else the headers of all parts are
merged (``image.merging``), and of each part those ranges are read that this rank needs (``spreading``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierfall.core.catalog import KnownCheckpoint
from tierfall.core.errors import BackendError, IntegrityError, NotSupportedError, RestoreError
from tierfall.core.image import Fill, ImageHeader, OnResize, Want
from tierfall.core.image.merging import Block, Merged, merge_headers
from tierfall.core.records import Manifest
from tierfall.core.restore.images import Image
from tierfall.core.restore.job import Job, OpenImage, find_images
from tierfall.core.restore.reader import Tally
from tierfall.core.restore.ring import Ring
from tierfall.core.restore.spreading import spread
from tierfall.core.values import Shard

logger = logging.getLogger("tierfall")


class Plan(Protocol):
    """Where the bytes of an image go; ``wants`` is the same of one that is merged."""

    @property
    def fills(self) -> Sequence[Fill]: ...

    @property
    def wants(self) -> Sequence[Want]: ...


MakePlan = Callable[[ImageHeader], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """What becomes of entries when other ranks saved them: ``rules`` by name, or the values of one rank, whatever the
    others had."""

    values_of: int | None = None
    rules: Mapping[str, OnResize] = field(default_factory=dict)


@dataclass(slots=True)
class Parts:
    """The images of all ranks of one checkpoint, opened when they are needed."""

    checkpoint: KnownCheckpoint
    tiers: Sequence[str]
    open_image: OpenImage
    tally: Tally
    ring: Ring | None
    chunks_max: int | None
    _found: dict[Shard, tuple[list[Image], Manifest]] = field(default_factory=dict)

    def open(self, shard: Shard) -> Job:
        """Open the good copies of one rank's image; raises as ``find_images`` does."""
        if shard not in self._found:
            self._found[shard] = find_images(
                self.checkpoint, self.tiers, self.open_image, shard, self.tally
            )
        images, manifest = self._found[shard]
        return Job(images, manifest, self.tally, self.ring, self.chunks_max)

    def manifest(self, shard: Shard) -> Manifest:
        return self._found[shard][1]


def plan_parts(
    parts: Parts, make_plan: MakePlan, shard: Shard, resize: Resize
) -> tuple[Plan, Callable[[], None]]:
    """Plan to restore what this rank, ``shard``, holds; return the plan, and what reads all that it needs.

    Raises RestoreError where the state does not fit what was saved.
    """
    commit = parts.checkpoint.commit
    world_size = shard.world_size if commit is None else commit.world_size
    if world_size == shard.world_size:
        with parts.open(shard) as job:
            header = job.read_header()
        try:
            plan = make_plan(header)
        except RestoreError as error:
            if world_size == 1:
                raise
            return _in_another_layout(parts, make_plan, shard, header, error)
        return plan, lambda: _read(parts, shard, plan.fills)
    return _reshard(parts, make_plan, world_size, shard.rank, resize)


def _in_another_layout(
    parts: Parts, make_plan: MakePlan, shard: Shard, header: ImageHeader, error: RestoreError
) -> tuple[Plan, Callable[[], None]]:
    """Plan with the parts of all ranks where this rank's own does not fit, for ``error``. That is what is raised where
    they cannot be read, unless ranks held tensors together: then another layout is what they are needed for."""
    own = Resize(values_of=shard.rank)
    try:
        return _reshard(parts, make_plan, shard.world_size, shard.rank, own)
    except (IntegrityError, BackendError, NotSupportedError) as unread:
        if any(stored.piece is not None for stored in header.tensors):
            raise
        logger.warning("restore: the parts of other ranks cannot be read either: %s", unread)
        raise error from None


def _reshard(
    parts: Parts, make_plan: MakePlan, world_size: int, rank: int, resize: Resize
) -> tuple[Plan, Callable[[], None]]:
    shards = [Shard(rank, world_size) for rank in range(world_size)]
    headers = {}
    for shard in shards:
        with parts.open(shard) as job:
            headers[shard.rank] = job.read_header()
    what = f"{parts.checkpoint.id} of {world_size} ranks"
    merged = merge_headers(headers, what=what, own=resize.values_of, rank=rank, rules=resize.rules)
    plan = make_plan(merged.header)
    manifests = {shard.rank: parts.manifest(shard) for shard in shards}
    reads = spread(merged, plan.wants, same=_known_equal(merged, manifests))

    def fill() -> None:
        for rank, fills in sorted(reads.fills.items()):
            _read(parts, shards[rank], fills)
        reads.finish()

    return plan, fill


def _read(parts: Parts, shard: Shard, fills: Sequence[Fill]) -> None:
    with parts.open(shard) as job:
        job.fill(fills)


def _known_equal(
    merged: Merged, manifests: Mapping[int, Manifest]
) -> Iterable[tuple[Block, Block]]:
    """Yield the replicas that lie at one place of images whose chunks there have the same digests: the same bytes."""
    for slot, others in merged.replicas.items():
        (first,) = merged.blocks[slot]
        for block in others:
            if (first.start, first.end) == (block.start, block.end) and _digests(
                manifests[first.rank], first
            ) == _digests(manifests[block.rank], block):
                yield first, block


def _digests(manifest: Manifest, block: Block) -> tuple[int, tuple[str, ...]]:
    low, high = block.start // manifest.chunk_bytes, (block.end - 1) // manifest.chunk_bytes
    return manifest.chunk_bytes, manifest.digests[1 + low : 2 + high]
