"""Export as safetensors: one file, or a new folder with shards, their index, and files that are copied beside them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.layout import plan_layout
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import format_some
from tierfall.export.gather import MergedCheckpoint, in_batches, mapped_file
from tierfall.export.output import CAST, ExportOptions, file_name, new_output
from tierfall.export.structure import StatePart, Structure, entries_of, tensors_of, values_of

TRUE_DTYPES = "tierfall.dtypes"
"""The member of a safetensors file's metadata with dtype and shape of the tensors that are stored as bytes."""


def export_safetensors(
    gathered: MergedCheckpoint, parts: tuple[StatePart, ...], path: Path, wish: ExportOptions
) -> tuple[int, list[str]]:
    """Write the tensors of the parts, as one file at ``path``, or as a folder of shards, their index and the files that
    are copied beside them; return the number of tensors, and notes.

    Raises ConfigError where there is no tensor, and as ``new_output`` and ``MergedCheckpoint.read`` do.
    """
    if not wish.only:
        return _export_image(gathered, parts, path, wish)
    named: dict[str, int] = {}
    for part in parts:
        named |= tensors_of(gathered.header, part, full_names=len(parts) > 1)
    if not named:
        raise ConfigError(
            f"export: {', '.join(wish.only)} has no tensor, and safetensors stores nothing else; "
            "use --format torch"
        )
    header = cast_header(gathered.header, wish.dtype)
    shards = _divide(header, named, wish.max_shard_bytes)
    base = file_name(gathered.run, gathered.id, wish) if wish.is_folder else path.name
    files, index = _names_of(base, len(shards)), f"{base}.index.json"
    for beside in wish.beside:
        if beside.name in (*files, index):
            raise ConfigError(f"export: --with {beside}: the export has a file of that name")
    metadata = {"tierfall.checkpoint": f"{gathered.run} {gathered.id}"}
    laid_out = [_lay_out(header, shard, {} if n else metadata) for n, shard in enumerate(shards)]
    room = sum(each.length for each in laid_out) + sum(b.stat().st_size for b in wish.beside)
    with new_output(
        path, folder=wish.is_folder, replace=wish.replace, room_bytes=room
    ) as unfinished:
        for name, each in zip(files, laid_out, strict=True):
            _write(unfinished / name if wish.is_folder else unfinished, each, gathered, wish.dtype)
        if len(shards) > 1:
            (unfinished / index).write_text(_index_of(header, shards, files))
        for beside in wish.beside:
            shutil.copyfile(beside, unfinished / beside.name)
    return len(named), [*left_out(parts), *as_bytes(gathered.header, named)]


def _divide(
    header: ImageHeader, named: Mapping[str, int], bytes_max: int | None
) -> list[dict[str, int]]:
    """Divide tensors into files of at most ``bytes_max`` bytes, in the order of the image; a larger tensor has one of
    its own. All names of a tensor are in one shard."""
    names: dict[int, list[str]] = {}
    for name, position in named.items():
        names.setdefault(position, []).append(name)

    def bytes_of(position: int) -> int:
        return header.tensors[position].length * len(names[position])

    most = sum(map(bytes_of, names)) if bytes_max is None else bytes_max
    return [
        {name: position for position in group for name in names[position]}
        for group in in_batches(sorted(names), bytes_of, most)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaidOut:
    """A file of a header and ``data_bytes`` behind it. ``places`` has where each tensor begins and ends in these, as
    often as it is there."""

    head: bytes
    places: Mapping[int, Sequence[tuple[int, int]]]
    data_bytes: int

    @property
    def length(self) -> int:
        return len(self.head) + self.data_bytes


def _write(
    path: Path, file: _LaidOut, gathered: MergedCheckpoint, dtype: torch.dtype | None = None
) -> None:
    memory = torch.from_numpy(mapped_file(path, file.length))
    memory[: len(file.head)] = torch.frombuffer(bytearray(file.head), dtype=torch.uint8)
    data = memory[len(file.head) :]
    targets = {p: [data[start:end] for start, end in at] for p, at in file.places.items()}
    gathered.read(targets, dtype)


def _names_of(base: str, count: int) -> list[str]:
    """Return the names of the shards, as Hugging Face names them; a single one has the name of the file."""
    if count == 1:
        return [base]
    stem = base.removesuffix(".safetensors")
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def _index_of(
    header: ImageHeader, shards: Sequence[Mapping[str, int]], files: Sequence[str]
) -> str:
    weight_map = {n: file for shard, file in zip(shards, files, strict=True) for n in shard}
    total = sum(header.tensors[position].length for shard in shards for position in shard.values())
    document = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(document, indent=2) + "\n"


def _export_image(
    gathered: MergedCheckpoint, parts: Sequence[StatePart], path: Path, wish: ExportOptions
) -> tuple[int, list[str]]:
    """Write a whole step as the image of one rank: that of a single rank as it is."""
    if gathered.images.world_size == 1:
        manifest, head = gathered.images.find(0)[1], bytes(gathered.images.header_bytes(0))
        data_bytes = manifest.image_bytes - manifest.data_start
        blocks = enumerate(gathered.merged.blocks)
        places = {position: [(b.start, b.end) for b in own] for position, own in blocks}
    else:
        structure = Structure(gathered.header, entries_of(parts))
        view = structure.view()
        layout = plan_layout(view)
        made = layout.header(view)
        assert made is not None, "the layout was planned with these values"
        head, data_bytes = made, layout.data_bytes
        places = {structure.positions[p.index]: [(p.start, p.end)] for p in layout.placements}
    laid_out = _LaidOut(head=head, places=places, data_bytes=data_bytes)
    with new_output(path, replace=wish.replace, room_bytes=laid_out.length) as file:
        _write(file, laid_out, gathered)
    return len(places), []


# The layout of a file -------------------------------------------------------------------------------


def cast_header(header: ImageHeader, dtype: torch.dtype | None) -> ImageHeader:
    """Return a header whose tensors of floating-point numbers have ``dtype``, and the lengths that go with it; None
    changes nothing. Its offsets are not those of the image."""
    if dtype is None:
        return header
    return replace(
        header,
        tensors=tuple(
            replace(t, dtype=dtype, start=0, end=dtypes.byte_count(dtype, t.shape))
            if t.dtype in CAST
            else t
            for t in header.tensors
        ),
    )


def _lay_out(
    header: ImageHeader, named: Mapping[str, int], metadata: Mapping[str, str]
) -> _LaidOut:
    """Lay out a safetensors file with the tensors ``named``, each once for each of its names: in the order of their
    item sizes, which keeps each aligned to its items, then of the image."""
    unsupported = {
        name: [dtypes.name_of(tensor.dtype), list(tensor.shape)]
        for name, position in named.items()
        if _code_and_shape(tensor := header.tensors[position]) is None
    }
    dtypes_of = {TRUE_DTYPES: json.dumps(unsupported)} if unsupported else {}
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, **dtypes_of}}
    places: dict[int, list[tuple[int, int]]] = {}
    end = 0

    def order(item: tuple[str, int]) -> tuple[int, int, str]:
        return -header.tensors[item[1]].dtype.itemsize, item[1], item[0]

    for name, position in sorted(named.items(), key=order):
        tensor = header.tensors[position]
        code, shape = _code_and_shape(tensor) or (dtypes.RAW_CODE, [tensor.length])
        start, end = end, end + tensor.length
        table[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        places.setdefault(position, []).append((start, end))
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return _LaidOut(head=head, places=places, data_bytes=end)


def _code_and_shape(tensor: StoredTensor) -> tuple[str, list[int]] | None:
    """Return how safetensors has a tensor; None if it must be stored as bytes."""
    shape = list(tensor.shape)
    if (code := dtypes.code_of(tensor.dtype)) is not None:
        return code, shape
    code, elements = LATER.get(tensor.dtype, (None, 1))
    if code is None or not shape or not _is_supported(tensor.dtype):
        return None
    return code, [*shape[:-1], shape[-1] * elements]


def left_out(parts: Sequence[StatePart]) -> list[str]:
    left = [name for part in parts for name in values_of(part)]
    if not left:
        return []
    return [
        f"omitted, as safetensors stores only tensors: {format_some(left)}; --format torch includes it"
    ]


def as_bytes(header: ImageHeader, named: Mapping[str, int]) -> list[str]:
    raw = [n for n, position in named.items() if _code_and_shape(header.tensors[position]) is None]
    if not raw:
        return []
    return [
        f"as bytes, since the installed safetensors has no such dtype (see tierfall.dtypes): {format_some(raw)}"
    ]


LATER = {
    dtype: as_stored
    for name, as_stored in {"float8_e8m0fnu": ("F8_E8M0", 1), "float4_e2m1fn_x2": ("F4", 2)}.items()
    if (dtype := dtypes.from_name(name)) is not None
}
"""The dtypes that later versions of safetensors have: the code, and how many elements of that one of torch is."""


@cache
def _is_supported(dtype: torch.dtype) -> bool:
    """Write a tensor of a dtype, and read it: whether the installed safetensors, if there is one, does both."""
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save
    except ImportError:
        return False
    tensor = torch.zeros(1, dtype=torch.uint8).view(dtype)
    file = os.memfd_create("safetensors")
    try:
        os.write(file, save({"x": tensor}))
        with safe_open(f"/proc/self/fd/{file}", "pt") as opened:
            read = opened.get_tensor("x")
    except (SafetensorError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return False
    finally:
        os.close(file)
    return (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
