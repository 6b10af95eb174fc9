"""Writing one image to a stored tier. The image becomes visible before its manifest, so that an existing manifest
proves a whole image. Neither counts before a commit record names them.

``write_view`` writes the image of a state straight to a tier, without host memory: chunk by chunk, in ascending
order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.format.commit_files import files_of, raw_files, with_packed
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import Commit, Geometry, Manifest, NamedFile
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.runtime.buffers import allocate
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import to_bytes
from tierfall.core.types.values import CheckpointId, Shard

Load = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of a view with its bytes: itself, unless it only stands for one that is read now."""


class ImageUpload(Protocol):
    """An image that is being written to a tier; several threads may write its chunks.

    ``find_chunks`` fills a view with what an earlier upload of this image has left from ``start`` on, whatever it is;
    False if nothing is left there. ``write_chunks`` writes the chunks from ``index`` on, which begin at ``start`` of
    the image. After a retryable failure the upload can continue: chunks for which ``has_chunk`` is true are not written
    again, and ``flush`` sends what is buffered; by default nothing is. ``finish`` makes the image visible and returns
    the files that the commit record names in place of the raw image; it may be repeated after a retryable failure.
    After any other failure the upload is unusable.
    """

    def has_chunk(self, index: int) -> bool:
        return False

    def find_chunks(self, start: int, view: memoryview) -> bool:
        return False

    def write_chunks(self, index: int, start: int, view: memoryview) -> None: ...

    def flush(self) -> None:
        return

    def finish(self, manifest: Manifest) -> tuple[NamedFile, ...]: ...

    def abort(self) -> None: ...


class WritableStore(Protocol):
    """The methods of a stored tier that writing an image needs."""

    def create_shard(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        *,
        attempt_id: str | None = None,
    ) -> ImageUpload: ...

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None: ...


@contextmanager
def aborted_on_failure(writer: ImageUpload) -> Iterator[ImageUpload]:
    """Abort a begun image, which the block writes and publishes, if the block fails before that."""
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


def write_view(
    store: WritableStore,
    view: StateView,
    commit: Commit,
    *,
    shard: Shard,
    chunk_bytes: int,
    load: Load = lambda tensor: tensor,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[NamedFile, ...]:
    """Write an image and its manifest; return their files for ``commit``, the record, which has none yet.

    Of the tensors that ``load`` returns, one is in use at a time. ``on_bytes`` is called with the bytes written since
    the last call. Raises what ``load`` and the store raise; the image is removed then.
    """
    layout, id = plan_layout(view), commit.lineage.checkpoint
    header = layout.header(view)
    assert header is not None, "the layout was planned with these values"
    cut = layout.image_plan(chunk_bytes)
    writer = store.create_shard(id, shard, cut, cut.pieces)
    with aborted_on_failure(writer):
        digests = _write_chunks(writer, cut, _bytes_of(layout, view, header, load), on_bytes)
        manifest = cut.manifest(commit.lineage, shard, digests)
        raw = raw_files(shard, image_bytes=cut.image_bytes, manifest=manifest.encode())
        raw_commit = replace(commit, files=raw)
        made = publish_image(store, writer, manifest, raw_commit, id=id, shard=shard)
        return files_of(made, shard)


def _write_chunks(
    writer: ImageUpload,
    cut: Geometry,
    parts: Iterator[torch.Tensor],
    on_bytes: Callable[[int], None],
) -> tuple[str, ...]:
    """Write the bytes of ``parts``, one after the other, chunk by chunk; return the digests of the chunks."""
    buffer = allocate(max(cut.data_start, cut.chunk_bytes))
    part = torch.empty(0, dtype=torch.uint8)
    digests = []
    for index in range(cut.chunk_count):
        start, end = cut.chunk_range(index)
        chunk = buffer[: end - start]
        target = torch.frombuffer(chunk, dtype=torch.uint8)
        while len(target):
            if not len(part):
                part = next(parts)
            count = min(len(target), len(part))
            target[:count].copy_(part[:count])
            target, part = target[count:], part[count:]
        digests.append(chunk_digest(chunk))
        writer.write_chunks(index, start, chunk)
        on_bytes(end - start)
    writer.flush()
    return tuple(digests)


def _bytes_of(layout: Layout, view: StateView, header: bytes, load: Load) -> Iterator[torch.Tensor]:
    """Yield the bytes of an image in ascending order, flat: the header, then each tensor."""
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for placement in layout.placements:
        if placement.end > placement.start:
            yield to_bytes(load(view.sources[placement.index]))
