"""Images of a checkpoint of two ranks, with their records, for tests of what a node keeps for others."""

from __future__ import annotations

import random

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.format.commit_files import raw_files
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Lineage, Manifest
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.kept_images import KeptImages

ONE = CheckpointId(1, 1)
CUT = Geometry(image_bytes=200_000, data_start=4096, chunk_bytes=65_536)


def image_of(id: CheckpointId, rank: int = 0, identity: str = "a") -> bytes:
    return random.Random(f"{id} {rank} {identity}").randbytes(CUT.image_bytes)


def records_of(
    id: CheckpointId, rank: int = 0, identity: str = "a", *, run: str = "run"
) -> tuple[Manifest, Commit]:
    """The manifest of that image, and the commit record of it alone."""
    shard, data = Shard(rank, 2), memoryview(image_of(id, rank, identity))
    ranges = map(CUT.chunk_range, range(CUT.chunk_count))
    lineage = Lineage(
        run=run, checkpoint=id, attempt_id=identity * 32, ordinal=id.step, started_from=None
    )
    manifest = Manifest(
        lineage=lineage,
        shard=shard,
        image_bytes=CUT.image_bytes,
        data_start=CUT.data_start,
        chunk_bytes=CUT.chunk_bytes,
        digests=tuple(chunk_digest(data[start:end]) for start, end in ranges),
        structure="",
        pieces=Spliced(b"[]"),
    )
    files = raw_files(shard, image_bytes=CUT.image_bytes, manifest=manifest.encode())
    commit = Commit(lineage=lineage, world_size=2, files=files, nodes=("n",), wall_time_s=1.0)
    return manifest, commit


def receive(
    images: KeptImages,
    id: CheckpointId,
    rank: int = 0,
    identity: str = "a",
    *,
    upload: int = 0,
    seals: bool = True,
) -> None:
    """Receive an image, as if its rank had sent it."""
    shard, data = Shard(rank, 2), image_of(id, rank, identity)
    upload = upload or 100 * id.step + rank
    begin(images, id, rank, upload=upload)
    for start in range(0, len(data), 65_536):
        part = data[start : start + 65_536]
        with images.receiving(id, shard, upload, start, len(part)) as memory:
            memory[:] = part
    if seals:
        manifest, commit = records_of(id, rank, identity)
        images.seal(id, shard, upload, manifest=manifest.encode(), commit=commit.encode())


def begin(
    images: KeptImages,
    id: CheckpointId,
    rank: int = 0,
    *,
    upload: int = 1,
    attempt_id: str | None = None,
    waiting: tuple[CheckpointId, ...] = (),
    image_bytes: int = CUT.image_bytes,
) -> bool:
    return images.begin(
        id,
        Shard(rank, 2),
        upload=upload,
        image_bytes=image_bytes,
        records_bytes=20_000,
        attempt_id=attempt_id,
        waiting=waiting,
    )
