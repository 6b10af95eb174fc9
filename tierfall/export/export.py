"""Exporting: a checkpoint, or a part of it, as one file that needs no tierfall to be read.

What one rank saved is written here, what several ranks saved, and DCP's folders, by ``exporting_ranks``.

Every chunk is verified before its bytes are written, and read from the next copy where one is damaged. Beside fixed
overhead no more memory is taken than two chunks: bytes stream into the file, and what ``torch.save`` is given lies in a
file too, mapped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tierfall.core.copies.shard_reader import OpenImage
from tierfall.core.format.catalog import KnownCheckpoint
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import slots_of
from tierfall.core.load.build import CPU, Builder
from tierfall.core.types.errors import ConfigError
from tierfall.export.export_ranks import export_ranks
from tierfall.export.options import (
    Exported,
    Format,
    Wish,
    as_bytes,
    exported,
    file_name,
    lay_out,
    left_out,
)
from tierfall.export.output import check_free, new_file, write_all
from tierfall.export.select import Part, select, tensors_of
from tierfall.export.stream import Source, Span, pour
from tierfall.export.torch_file import save_torch
from tierfall.ops.commands import Watch

__all__ = ["Exported", "Format", "Wish", "export"]


def export(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    wish: Wish,
    watch: Watch = lambda done, total: None,
) -> Exported:
    """Write one checkpoint, read from ``tiers``, fastest first; ``watch`` is told bytes read and bytes in all.

    Raises ConfigError for parts that are not there, IntegrityError where no copy is good, BackendError and
    CapacityError for what is wrong with the place, RestoreError where a registered type is not registered here, and for
    what ranks do not have alike.
    """
    if wish.format is Format.DCP or (checkpoint.commit and checkpoint.commit.world_size > 1):
        return export_ranks(checkpoint, tiers, open_image, wish, watch)
    with Source.open(checkpoint, tiers, open_image, watch) as source:
        path = wish.to / file_name(source.run, source.id, wish)
        check_free(path, replace=wish.replace)
        parts = select(source.header, wish.only)
        export_as = _export_torch if wish.format is Format.TORCH else _export_safetensors
        tensors, notes = export_as(source, parts, path, wish)
        return exported(checkpoint.id, path, tensors, source.tally, notes)


# safetensors ------------------------------------------------------------------------------------------


def _export_safetensors(
    source: Source, parts: tuple[Part, ...], path: Path, wish: Wish
) -> tuple[int, list[str]]:
    if not wish.only:
        return _export_image(source, path, wish)
    header = source.header
    named: dict[str, int] = {}
    for part in parts:
        named |= tensors_of(header, part, full_names=len(parts) > 1)
    if not named:
        raise ConfigError(
            f"export: {', '.join(wish.only)} holds no tensor, and safetensors holds nothing else; use --format torch"
        )
    said = {"tierfall.checkpoint": f"{source.run} {source.id}"}
    head, places, end = lay_out(header, named, range(len(header.tensors)), said)
    spans = [_span(header, slot, places[slot]) for slot in sorted(places)]
    notes = [*left_out(parts), *as_bytes(header, named)]
    with new_file(path, replace=wish.replace, room_bytes=end) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, memoryview(head), 0)
            pour(source, spans, descriptor)
        finally:
            os.close(descriptor)
    return len(named), notes


def _span(header: ImageHeader, slot: int, targets: Sequence[int]) -> Span:
    stored, base = header.tensors[slot], header.data_start
    return Span(start=base + stored.start, end=base + stored.end, targets=tuple(targets))


def _export_image(source: Source, path: Path, wish: Wish) -> tuple[int, list[str]]:
    """The whole state is what the image is: a safetensors file already."""
    span = Span(start=0, end=source.manifest.image_bytes, targets=(0,))
    with new_file(path, replace=wish.replace, room_bytes=span.end) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            pour(source, [span], descriptor)
        finally:
            os.close(descriptor)
    return len(source.header.tensors), []


# torch -----------------------------------------------------------------------------------------------


class _MappedBuilder(Builder):
    """Builds a state whose tensors lie in a mapped image."""

    def __init__(self, header: ImageHeader, mapping: mmap.mmap) -> None:
        super().__init__(header)
        self._mapping = mapping
        self._mapped: dict[int, torch.Tensor] = {}

    def flat(self, slot: int, device: torch.device) -> torch.Tensor:
        """Return a slot's bytes where they lie, as a storage of its own: torch.save writes whole storages."""
        if slot not in self._mapped:
            stored = self.header.tensors[slot]
            self._mapped[slot] = (
                torch.frombuffer(
                    self._mapping,
                    dtype=torch.uint8,
                    count=stored.length,
                    offset=self.header.data_start + stored.start,
                )
                if stored.length
                else torch.empty(0, dtype=torch.uint8)
            )
        return self._mapped[slot]


def _export_torch(
    source: Source, parts: tuple[Part, ...], path: Path, wish: Wish
) -> tuple[int, list[str]]:
    header, base = source.header, source.header.data_start
    slots = sorted({slot for part in parts for slot in slots_of(part.node)})
    spans = [
        Span(start=base + t.start, end=base + t.end, targets=(base + t.start,))
        for t in (header.tensors[slot] for slot in slots)
    ]
    data_bytes = sum(span.end - span.start for span in spans)
    with new_file(path, replace=wish.replace, room_bytes=2 * data_bytes) as unfinished:
        mapping = _map_image(source, spans, unfinished)
        builder = _MappedBuilder(header, mapping)
        for part in parts:
            builder.prepare(part.node, CPU)
        built = {part.name: builder.build(part.node, CPU) for part in parts}
        notes = save_torch(built[parts[0].name] if len(parts) == 1 else built, unfinished, path)
    return len(slots), notes


def _map_image(source: Source, spans: Sequence[Span], beside: Path) -> mmap.mmap:
    """Bring spans of an image to their places in a file without a name, and map it."""
    path = beside.with_name(f"{beside.name}.image")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()  # it goes with the mapping, whatever happens
        os.ftruncate(descriptor, source.manifest.image_bytes)
        pour(source, spans, descriptor)
        return mmap.mmap(descriptor, source.manifest.image_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
