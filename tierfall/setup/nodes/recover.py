"""A rank's image that other nodes keep, back in its host memory, before a start looks at what the tiers hold.

A node that was replaced has an empty host memory. With its ranks' images in it again, the newest checkpoint is in the
memory of all ranks, as after a start that lost no node: it is restored from there, and flushed to the nodes that keep
copies now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.images import StoredImage, checked_manifest, unpacked
from tierfall.core.copies.shard_reader import ShardReader
from tierfall.core.format.catalog import FoundCopy, Listing, merge
from tierfall.core.format.commit_files import files_of, image_file, plain
from tierfall.core.format.records import Commit, records_bytes_max
from tierfall.core.types.errors import TierfallError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, CopyState, Shard
from tierfall.tiers.host import HostTier
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


def recover_image(
    host: HostTier,
    keeper: StoredTier,
    shard: Shard,
    listings: Sequence[Listing],
    is_ours: Callable[[Commit], bool],
) -> CheckpointId | None:
    """Copy the image of ``shard`` of the newest checkpoint from ``keeper``, which is the tier as another node sees it,
    into ``host``, which has no image; return the checkpoint.

    ``listings`` are what this rank has found on all tiers. None where the newest live checkpoint has no image of this
    shard there, or is not ``is_ours``; and where it is not read, or is damaged: that is logged.
    """
    try:
        found = _newest(keeper, shard, listings, is_ours)
        if found is not None:
            _copy(found, host, keeper, shard)
    except TierfallError as error:
        logger.warning(
            "open: this rank's image is not brought back into host memory from another node's: %s",
            error,
        )
        return None
    return None if found is None else found.id


def _newest(
    keeper: StoredTier,
    shard: Shard,
    listings: Sequence[Listing],
    is_ours: Callable[[Commit], bool],
) -> FoundCopy | None:
    """Return the keeper's copy of the newest live checkpoint of this run of which any tier has an image of this shard;
    None where the keeper has none, or has only one of an older checkpoint."""
    there = keeper.list()
    copies = tuple(c for c in there.copies if c.commit is not None and is_ours(c.commit))
    there = replace(there, tier=f"{there.tier} of another node", copies=copies)
    live = (
        known.copies
        for known in reversed(merge((*listings, there)))
        if not (known.tombstoned or known.abandoned)
    )
    good = ({tier: c for tier, c in copies.items() if _has_image(c, shard)} for copies in live)
    return next(filter(None, good), {}).get(there.tier)


def _has_image(copy: FoundCopy, shard: Shard) -> bool:
    if copy.state is not CopyState.COMMITTED or copy.damage is not None or copy.commit is None:
        return False
    return image_file(copy.commit, shard) is not None


def _copy(found: FoundCopy, host: HostTier, keeper: StoredTier, shard: Shard) -> None:
    assert found.commit is not None
    began_s = time.monotonic()
    stored = StoredImage(keeper, found.id, shard)
    manifest = checked_manifest(stored, found.commit, shard)
    image = unpacked(stored, found.commit, manifest)
    # As the rank's own record was: of its image alone.
    commit = plain(replace(found.commit, files=files_of(found.commit, shard)))
    records = manifest.encode(), commit.encode()
    reserved_bytes = records_bytes_max(
        pieces_bytes=len(manifest.pieces),
        chunks=len(manifest.digests),
        metrics=commit.metrics,
        tags=commit.tags,
        run=commit.lineage.run,
    )
    records_bytes = max(reserved_bytes, sum(map(len, records)))
    needed = {"image_bytes": manifest.image_bytes, "records_bytes": records_bytes}
    host.ensure_capacity(**needed)
    region = host.allocate(**needed)
    assert region is not None, "it is empty"
    try:
        filled = np.frombuffer(region.image, np.uint8)

        def use(index: int, view: memoryview) -> None:
            start, end = manifest.chunk_range(index)
            np.copyto(filled[start:end], np.frombuffer(view, np.uint8))

        with ShardReader([image], manifest, ReadTally(), None, None) as reader:
            reader.read_chunks(range(len(manifest.digests)), use)
        region.seal(manifest=records[0], commit=records[1])
    except BaseException:
        region.release()
        raise
    logger.info(
        "open: this rank's image of %s, %s, is brought back into host memory from %s in %.1f s",
        found.id,
        format_size(manifest.image_bytes),
        keeper.name,
        time.monotonic() - began_s,
    )
