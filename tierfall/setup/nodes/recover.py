"""A rank's image that other nodes keep, back in its host memory, before a start looks at what the tiers hold.

A node that was replaced has an empty host memory. With its ranks' images in it again, the newest checkpoint is in the
memory of all ranks, as after a start that lost no node: it is restored from there, and flushed to the nodes that keep
copies now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.copies.chunk_reader import ReadTally
from tierfall.core.copies.images import StoredImage, checked_manifest, unpacked
from tierfall.core.copies.shard_reader import ShardReader
from tierfall.core.format.catalog import FoundCopy
from tierfall.core.format.commit_files import files_of, image_file, plain
from tierfall.core.format.records import Commit, records_bytes_max
from tierfall.core.types.errors import TierfallError, UnreachableError
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")


class ImageMemory(Protocol):
    """The methods of host memory that this needs."""

    @property
    def name(self) -> str: ...

    def allocate_for_one(self, *, image_bytes: int, records_bytes: int) -> HostRegion: ...


def recover_image(
    host: ImageMemory,
    keepers: StoredTier,
    shard: Shard,
    is_ours: Callable[[Commit], bool],
    *,
    timeout_s: float,
) -> CheckpointId | None:
    """Copy the image of ``shard`` of the newest checkpoint on ``keepers`` into ``host``, which has no image; return
    the checkpoint.

    None where no checkpoint that ``is_ours`` has an image of this shard, and where it is not read, and good, within
    ``timeout_s`` seconds: that is logged.
    """
    try:
        found = _newest(keepers, shard, is_ours)
        if found is not None:
            _copy(found, host, keepers, shard, until_s=time.monotonic() + timeout_s)
    except TierfallError as error:
        logger.warning(
            "open: this rank's image is not brought back into host memory; it is restored from where it is: %s",
            error,
        )
        return None
    return None if found is None else found.id


def _newest(
    keepers: StoredTier, shard: Shard, is_ours: Callable[[Commit], bool]
) -> FoundCopy | None:
    """Return the newest checkpoint of this run whose record names an image of this shard."""
    copies = [
        copy
        for copy in keepers.list().copies
        if copy.commit is not None
        and copy.damage is None
        and image_file(copy.commit, shard)
        and is_ours(copy.commit)
    ]
    return max(copies, key=lambda copy: (copy.id.attempt, copy.id.step), default=None)


def _copy(
    found: FoundCopy, host: ImageMemory, keepers: StoredTier, shard: Shard, *, until_s: float
) -> None:
    assert found.commit is not None
    began_s = time.monotonic()
    stored = StoredImage(keepers, found.id, shard)
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
    region = host.allocate_for_one(image_bytes=manifest.image_bytes, records_bytes=records_bytes)
    try:
        filled = np.frombuffer(region.image, np.uint8)

        def use(index: int, view: memoryview) -> None:
            if time.monotonic() > until_s:
                raise UnreachableError(f"{keepers.name}: {found.id} was not read in time")
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
        keepers.name,
        time.monotonic() - began_s,
    )
