"""Writing the image of a state straight to a stored tier, without host memory: chunk by chunk, in ascending order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.image_writes import (
    ImageUpload,
    WritableStore,
    begun_image,
    publish_image,
)
from tierfall.core.format.commit_files import files_of, raw_files
from tierfall.core.format.records import Commit, Geometry, Lineage, Manifest, NamedFile
from tierfall.core.image.layout import Layout, plan_layout
from tierfall.core.runtime.buffers import allocate
from tierfall.core.state.view import StateView
from tierfall.core.tensors.tensors import as_bytes, copy_whole
from tierfall.core.types.values import Shard

Load = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of a view with its bytes: itself, unless it only stands for one that is read now."""


def write_view(
    store: WritableStore,
    view: StateView,
    *,
    lineage: Lineage,
    shard: Shard,
    chunk_bytes: int,
    commit: Callable[[tuple[NamedFile, ...]], Commit],
    load: Load = lambda tensor: tensor,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[NamedFile, ...]:
    """Write an image and its manifest; return their files for the commit record, which ``commit`` makes of them.

    Of the tensors that ``load`` returns, one is in use at a time. ``on_bytes`` is called with the bytes written since
    the last call. Raises what ``load`` and the store raise; the image is removed then.
    """
    layout = plan_layout(view)
    header = layout.header(view)
    assert header is not None, "the layout was planned with these values"
    cut = Geometry(
        image_bytes=layout.image_bytes, data_start=layout.data_start, chunk_bytes=chunk_bytes
    )
    with begun_image(store, lineage.checkpoint, shard, cut, layout.pieces) as writer:
        source = _ImageBytes(layout, view, header, load)
        manifest = Manifest(
            lineage=lineage,
            shard=shard,
            image_bytes=cut.image_bytes,
            data_start=cut.data_start,
            chunk_bytes=cut.chunk_bytes,
            digests=_write_chunks(writer, cut, source, on_bytes),
            structure=layout.structure,
            pieces=layout.pieces,
        )
        raw = raw_files(shard, image_bytes=cut.image_bytes, manifest=manifest.encode())
        made = publish_image(
            store, writer, manifest, commit(raw), id=lineage.checkpoint, shard=shard
        )
        return files_of(made, shard)


def _write_chunks(
    writer: ImageUpload, cut: Geometry, source: _ImageBytes, on_bytes: Callable[[int], None]
) -> tuple[str, ...]:
    buffer = allocate(max(cut.data_start, cut.chunk_bytes))
    digests = []
    for index in range(cut.chunk_count):
        start, end = cut.chunk_range(index)
        chunk = buffer[: end - start]
        source.read(start, torch.frombuffer(chunk, dtype=torch.uint8))
        digests.append(chunk_digest(chunk))
        writer.write_chunks(index, start, chunk)
        on_bytes(end - start)
    writer.flush()
    return tuple(digests)


class _ImageBytes:
    """The bytes of an image in ascending order: the header, then each tensor."""

    def __init__(self, layout: Layout, view: StateView, header: bytes, load: Load) -> None:
        self._sources = view.sources
        self._load = load
        self._placements = [
            placement for placement in layout.placements if placement.end > placement.start
        ]
        self._data_start = layout.data_start
        self._parts = iter(self._placements)
        self._start, self._flat = 0, torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill ``target``, flat, with the bytes from ``start`` on."""
        done = 0
        while done < len(target):
            at = start + done - self._start
            if at >= len(self._flat):
                self._next()
                continue
            count = min(len(target) - done, len(self._flat) - at)
            target[done : done + count].copy_(self._flat[at : at + count])
            done += count

    def _next(self) -> None:
        placement = next(self._parts)
        source = self._load(self._sources[placement.index])
        flat = as_bytes(source)
        if flat is None:
            flat = torch.empty(placement.end - placement.start, dtype=torch.uint8)
            copy_whole(flat, source)
        self._start, self._flat = self._data_start + placement.start, flat
