"""Exporting: a checkpoint, or a part of it, as one file that needs no tierfall to be read.

Every chunk is verified before its bytes are written, and read from the next copy where one is damaged. Beside fixed
overhead no more memory is taken than two chunks: bytes stream into the file, and what ``torch.save`` is given lies in a
file too, mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tierfall.core.catalog import KnownCheckpoint
from tierfall.core.errors import BackendError, ConfigError, NotSupportedError
from tierfall.core.image import ImageHeader, dtypes
from tierfall.core.image.build import CPU, Builder
from tierfall.core.image.nodes import slots_of
from tierfall.core.restore.job import OpenImage
from tierfall.core.restore.reader import Fallback
from tierfall.core.values import CheckpointId
from tierfall.new_file import check_free, new_file, write_all
from tierfall.orders import Watch
from tierfall.pouring import Source, Span, pour
from tierfall.selecting import Part, select, tensors_of, values_of

NAMES_SHOWN = 4


class Format(StrEnum):
    """What is written."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


_SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.TORCH: ".pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to export: the parts named by ``only`` (none: all of it) into the folder ``to``."""

    to: Path
    format: Format
    only: tuple[str, ...] = ()
    replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, from which tiers it was read (in bytes), what was passed over, and what is worth knowing."""

    id: CheckpointId
    path: Path
    bytes: int
    tensors: int
    sources: Mapping[str, int]
    fallbacks: tuple[Fallback, ...]
    notes: tuple[str, ...]


def export(
    checkpoint: KnownCheckpoint,
    tiers: Sequence[str],
    open_image: OpenImage,
    wish: Wish,
    watch: Watch = lambda done, total: None,
) -> Exported:
    """Write one checkpoint, read from ``tiers``, fastest first; ``watch`` is told bytes read and bytes in all.

    Raises ConfigError for parts that are not there, IntegrityError where no copy is good, BackendError and
    CapacityError for what is wrong with the place, RestoreError where a registered type is not registered here.
    """
    if wish.format is Format.DCP:
        raise NotSupportedError(
            "export: --format dcp is not supported yet; use safetensors or torch"
        )
    with Source.open(checkpoint, tiers, open_image, watch) as source:
        path = wish.to / _file_name(source, wish)
        check_free(path, replace=wish.replace)
        parts = select(source.header, wish.only)
        export_as = _export_torch if wish.format is Format.TORCH else _export_safetensors
        tensors, notes = export_as(source, parts, path, wish)
        return Exported(
            id=checkpoint.id,
            path=path,
            bytes=path.stat().st_size,
            tensors=tensors,
            sources=dict(source.tally.bytes),
            fallbacks=tuple(source.tally.fallbacks),
            notes=tuple(notes),
        )


def _file_name(source: Source, wish: Wish) -> str:
    name = f"{source.run}-step-{source.id.step:08d}"
    if len(wish.only) == 1:
        (name,) = wish.only
        if "/" in name or name.startswith("."):
            raise ConfigError(f"--only {name!r}: it cannot name a file")
    return name + _SUFFIXES[wish.format]


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
    head, spans, end = _lay_out(source, named)
    notes = [*_left_out(parts), *_as_bytes(header, named)]
    with new_file(path, replace=wish.replace, room_bytes=end) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, memoryview(head), 0)
            pour(source, spans, descriptor)
        finally:
            os.close(descriptor)
    return len(named), notes


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


def _lay_out(source: Source, named: Mapping[str, int]) -> tuple[bytes, list[Span], int]:
    """Return the header of a file that holds these tensors, what goes where, and the length of the file.

    Tensors stand in the image's order, which aligns each to its items; one with several names is written for each.
    """
    stored = source.header.tensors
    table: dict[str, Any] = {"__metadata__": _metadata(source, named)}
    places: dict[int, list[int]] = {}
    end = 0
    for name, slot in sorted(named.items(), key=lambda item: (item[1], item[0])):
        tensor = stored[slot]
        code, shape = dtypes.code_of(tensor.dtype), list(tensor.shape)
        if code is None:
            code, shape = dtypes.RAW_CODE, [tensor.length]
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + tensor.length]}
        places.setdefault(slot, []).append(end)
        end += tensor.length
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    base = source.header.data_start
    spans = [
        Span(
            start=base + stored[slot].start,
            end=base + stored[slot].end,
            targets=tuple(len(head) + place for place in places[slot]),
        )
        for slot in sorted(places)
    ]
    return head, spans, len(head) + end


def _metadata(source: Source, named: Mapping[str, int]) -> dict[str, str]:
    metadata = {"format": "pt", "tierfall.checkpoint": f"{source.run} {source.id}"}
    true = {
        name: [dtypes.name_of(tensor.dtype), list(tensor.shape)]
        for name, slot in named.items()
        if dtypes.code_of((tensor := source.header.tensors[slot]).dtype) is None
    }
    if true:
        metadata["tierfall.dtypes"] = json.dumps(true)
    return metadata


def _left_out(parts: Sequence[Part]) -> list[str]:
    left = [name for part in parts for name in values_of(part)]
    if not left:
        return []
    return [
        f"left out, since safetensors holds tensors alone: {_some(left)}; --format torch has it"
    ]


def _as_bytes(header: ImageHeader, named: Mapping[str, int]) -> list[str]:
    raw = [n for n, slot in named.items() if dtypes.code_of(header.tensors[slot].dtype) is None]
    if not raw:
        return []
    return [
        f"as bytes, since safetensors' loader has no such dtype (see tierfall.dtypes): {_some(raw)}"
    ]


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
        try:
            with open(unfinished, "xb") as file:  # by its name torch would call what is in it
                torch.save(built[parts[0].name] if len(parts) == 1 else built, file)
        except RuntimeError as error:  # what torch makes of a full disk or Ctrl-C, among others
            if (first := _first_cause(error)) is not None:
                raise first from None
            why = str(error).splitlines()[0]
            raise BackendError(f"export to {path}: torch.save could not write it: {why}") from error
        notes = _why_not_plain(unfinished)
    return len(slots), notes


def _first_cause(error: RuntimeError) -> BaseException | None:
    """Return what torch's own error hides, if anything: having failed to write, it fails again to end the file."""
    first: BaseException = error
    while first.__context__ is not None and not isinstance(first, KeyboardInterrupt):
        first = first.__context__
    return first if isinstance(first, OSError | KeyboardInterrupt) else None


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


def _why_not_plain(path: Path) -> list[str]:
    """Find out whether ``torch.load`` takes the file as it comes, by trying; nothing of its tensors is read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        return [
            "torch.load takes it with weights_only=False alone, since it holds more than tensors and plain values, "
            "such as the random state of NumPy; --only names the parts to export"
        ]
    return []
