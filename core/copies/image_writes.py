"""Writing one image onto a stored tier. The image becomes visible first, and its manifest after it: a manifest that is
there says that its image is whole. Neither counts before a commit record names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tierfall.core.format.commit_files import with_packed
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, NamedFile
from tierfall.core.types.values import CheckpointId, Shard


class ImageUpload(Protocol):
    """One image on its way to a tier; several threads bring its chunks.

    ``write_chunks`` takes the chunks from ``index`` on, which lie from ``start`` in the image. After a retryable
    failure the writer lives: a chunk that it ``has_chunk`` nevertheless is not brought again, and ``flush`` sends what
    waits. ``finish`` makes the image visible and returns the files that the commit record names in place of the raw
    image; it may be called again after a retryable failure. After any other failure the writer is dead.
    """

    def has_chunk(self, index: int) -> bool: ...

    def write_chunks(self, index: int, start: int, view: memoryview) -> None: ...

    def flush(self) -> None: ...

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]: ...

    def abort(self) -> None: ...


class WritableStore(Protocol):
    """What writing an image needs of a stored tier."""

    def create_shard(
        self, checkpoint: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
    ) -> ImageUpload: ...

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None: ...


@contextmanager
def begun_image(
    store: WritableStore, id: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
) -> Iterator[ImageUpload]:
    """Begin an image, for the block to write and publish; nothing of it stays where the block fails before that."""
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
    """Make a whole image visible, and then its manifest; return the record that names the image as it is stored here.

    May be called again after a retryable failure.
    """
    commit = with_packed(commit, shard, writer.finish(manifest))
    store.write_manifest(id, shard, manifest.encode())
    return commit
