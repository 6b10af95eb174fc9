"""Which step can be restored instead of one that was saved by path.

It is for a message: what cannot be read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.shard_reader import PASSABLE, OpenImage, ShardReader, find_images
from tierfall.core.format.catalog import KnownCheckpoint, Listing
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.raw_files import are_files, refuse_files
from tierfall.core.restore.candidates import RestoreRequest
from tierfall.core.restore.reshard import MakePlan, RestorePlan
from tierfall.core.types.values import Shard


def states_only(
    make_plan: MakePlan,
    candidates: Iterable[KnownCheckpoint],
    listings: Sequence[Listing],
    request: RestoreRequest,
    open_image: OpenImage,
    shard: Shard,
) -> MakePlan:
    """Plan as ``make_plan`` does, but raise RestoreError for what was saved by path, naming the step to restore
    instead."""

    def instead() -> str:
        return step_instead(candidates, listings, request, open_image, shard)

    def plan(header: ImageHeader) -> RestorePlan:
        refuse_files(header, doing=request.operation, instead=instead)
        return make_plan(header)

    return plan


def step_instead(
    candidates: Iterable[KnownCheckpoint],
    listings: Sequence[Listing],
    request: RestoreRequest,
    open_image: OpenImage,
    shard: Shard,
) -> str:
    """Name the newest of ``candidates`` that holds a state, as far as this rank, ``shard``, can see; an empty text
    where there is none."""
    for checkpoint in candidates:
        tiers = [x.tier for x in listings if x.tier in checkpoint.copies]
        read = [tier for tier in tiers if request.tier in (None, tier)]
        header = _header(checkpoint, read, open_image, shard)
        if header is not None and not are_files(header):
            return f"; the newest step that holds a state is {checkpoint.id}: name it by step={checkpoint.id.step}"
    return ""


def _header(
    checkpoint: KnownCheckpoint, tiers: Sequence[str], open_image: OpenImage, shard: Shard
) -> ImageHeader | None:
    """Read the header of one rank's image; they all say whether it is a state."""
    saved = shard.world_size if checkpoint.commit is None else checkpoint.commit.world_size
    one = shard if saved == shard.world_size else Shard(0, saved)
    tally = ReadTally()
    try:
        images, manifest = find_images(checkpoint, tiers, open_image, one, tally)
        with ShardReader(images, manifest, tally, None, 1) as job:
            return job.read_header()
    except PASSABLE:
        return None
