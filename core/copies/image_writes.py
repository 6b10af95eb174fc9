"""Writing one image to a stored tier. The image becomes visible before its manifest, so that an existing manifest
proves a whole image. Neither counts before a commit record names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tierfall.core.format.commit_files import with_packed
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, NamedFile
from tierfall.core.types.values import CheckpointId, Shard


class ImageUpload(Protocol):
    """An image that is being written to a tier; several threads may write its chunks.

    ``write_chunks`` writes the chunks from ``index`` on, which begin at ``start`` of the image. After a retryable
    failure the upload can continue: chunks for which ``has_chunk`` is true are not written again, and ``flush`` sends
    what is buffered. ``finish`` makes the image visible and returns the files that the commit record names in place of
    the raw image; it may be repeated after a retryable failure. After any other failure the upload is unusable.
    """

    def has_chunk(self, index: int) -> bool: ...

    def write_chunks(self, index: int, start: int, view: memoryview) -> None: ...

    def flush(self) -> None: ...

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]: ...

    def abort(self) -> None: ...


class WritableStore(Protocol):
    """The methods of a stored tier that writing an image needs."""

    def create_shard(
        self, checkpoint: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
    ) -> ImageUpload: ...

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None: ...


@contextmanager
def begun_image(
    store: WritableStore, id: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
) -> Iterator[ImageUpload]:
    """Begin an image, which the block writes and publishes; if the block fails before that, the image is removed."""
    writer = store.create_shard(id, shard, cut, pieces)
    try:
        yield writer
    except BaseException:
        writer.abort()
        raise


def publish_image(
    store: WritableStore,
    writer: ImageUpload,
    manifest: Manifest,
    commit: Commit,
    *,
    id: CheckpointId,
    shard: Shard,
) -> Commit:
    """Make a whole image visible, then its manifest; return the commit record with the files of the image on this tier.

    May be repeated after a retryable failure.
    """
    commit = with_packed(commit, shard, writer.finish(manifest))
    store.write_manifest(id, shard, manifest.encode())
    return commit
