"""Export as safetensors: one file, or a new folder with shards, their index, and files that are copied beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.layout import plan_layout
from tierfall.core.types.errors import ConfigError
from tierfall.export.gather import MergedCheckpoint
from tierfall.export.options import (
    ExportOptions,
    as_bytes,
    cast_header,
    file_name,
    lay_out,
    left_out,
)
from tierfall.export.output import new_file, new_folder, write_all
from tierfall.export.select import StatePart, tensors_of
from tierfall.export.structure import Structure, entries_of


def export_safetensors(
    gathered: MergedCheckpoint, parts: tuple[StatePart, ...], path: Path, wish: ExportOptions
) -> tuple[int, list[str]]:
    """Write the tensors of the parts, as one file at ``path`` or as a folder; return their number, and notes.

    Raises ConfigError where there is no tensor, and as ``new_file``, ``new_folder`` and ``MergedCheckpoint.write`` do.
    """
    if not wish.only:
        return _export_image(gathered, parts, path, wish)
    header = gathered.header
    metadata = {"tierfall.checkpoint": f"{gathered.run} {gathered.id}"}
    named: dict[str, int] = {}
    for part in parts:
        named |= tensors_of(header, part, full_names=len(parts) > 1)
    if not named:
        raise ConfigError(
            f"export: {', '.join(wish.only)} has no tensor, and safetensors stores nothing else; "
            "use --format torch"
        )
    shards = _divide(cast_header(header, wish.dtype), named, wish.max_shard_bytes)
    if wish.is_folder:
        _export_folder(gathered, shards, metadata, path, wish)
    else:
        _export_file(gathered, shards[0], metadata, path, wish)
    return len(named), [*left_out(parts), *as_bytes(header, named)]


class _Shard:
    """One file of an export: the header, the offsets of each tensor, and its length. Tensors are in the order of their
    item sizes, then of the image."""

    def __init__(self, header: ImageHeader, named: Mapping[str, int]) -> None:
        self._header = header
        self.named = named

    def lay_out(self, metadata: Mapping[str, str]) -> tuple[bytes, dict[int, list[int]], int]:
        """Return header, offsets and length."""
        tensors = self._header.tensors
        order = sorted(set(self.named.values()), key=lambda p: (-tensors[p].dtype.itemsize, p))
        return lay_out(self._header, self.named, order, metadata)

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(self._header.tensors[position].length for position in self.named.values())


def _divide(header: ImageHeader, named: Mapping[str, int], bytes_max: int | None) -> list[_Shard]:
    """Divide tensors into shards of at most ``bytes_max`` bytes, in the order of the image; a larger tensor has one of
    its own. All names of a tensor are in one shard."""
    names: dict[int, list[str]] = {}
    for name, position in named.items():
        names.setdefault(position, []).append(name)
    groups: list[dict[str, int]] = [{}]
    size = 0
    for position in sorted(names):
        length = header.tensors[position].length * len(names[position])
        if bytes_max is not None and groups[-1] and size + length > bytes_max:
            groups.append({})
            size = 0
        groups[-1].update(dict.fromkeys(names[position], position))
        size += length
    return [_Shard(header, group) for group in groups]


def _export_file(
    gathered: MergedCheckpoint,
    shard: _Shard,
    metadata: Mapping[str, str],
    path: Path,
    wish: ExportOptions,
) -> None:
    head, places, length = shard.lay_out(metadata)
    with _opened(path, wish, length) as descriptor:
        write_all(descriptor, memoryview(head), 0)
        gathered.write(places, descriptor, dtype=wish.dtype)


def _export_folder(
    gathered: MergedCheckpoint,
    shards: Sequence[_Shard],
    metadata: Mapping[str, str],
    path: Path,
    wish: ExportOptions,
) -> None:
    """Write shards, index and copied files into a new folder, which appears whole."""
    base = file_name(gathered.run, gathered.id, wish)
    files = _names_of(base, len(shards))
    index = f"{base}.index.json"
    for beside in wish.beside:
        if beside.name in (*files, index):
            raise ConfigError(f"export: --with {beside}: the export has a file of that name")
    laid_out = [shard.lay_out(metadata if n == 0 else {}) for n, shard in enumerate(shards)]
    room = sum(length for _, _, length in laid_out) + sum(b.stat().st_size for b in wish.beside)
    progress = gathered.progress(p for _, places, _ in laid_out for p in places)
    with new_folder(path, room_bytes=room) as folder:
        for name, (head, places, _) in zip(files, laid_out, strict=True):
            with _created(folder / name) as descriptor:
                write_all(descriptor, memoryview(head), 0)
                gathered.write(places, descriptor, dtype=wish.dtype, progress=progress)
        if len(shards) > 1:
            (folder / index).write_text(_index_of(shards, files))
        for beside in wish.beside:
            shutil.copyfile(beside, folder / beside.name)


def _names_of(base: str, count: int) -> list[str]:
    """Return the names of the shards, as Hugging Face names them; a single one has the name of the file."""
    if count == 1:
        return [base]
    stem = base.removesuffix(".safetensors")
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def _index_of(shards: Sequence[_Shard], files: Sequence[str]) -> str:
    weight_map = {n: file for shard, file in zip(shards, files, strict=True) for n in shard.named}
    total = sum(shard.bytes for shard in shards)
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
        with (
            gathered.images.open(0) as job,
            _opened(path, wish, job.manifest.image_bytes) as descriptor,
        ):
            gathered.write_image(job, descriptor)
        return len(gathered.header.tensors), []
    structure = Structure(gathered.header, entries_of(parts))
    view = structure.view()
    layout = plan_layout(view)
    head = layout.header(view)
    assert head is not None, "the layout was planned with these values"
    places = {
        structure.positions[place.index]: [layout.data_start + place.start]
        for place in layout.placements
    }
    with _opened(path, wish, layout.image_bytes) as descriptor:
        write_all(descriptor, memoryview(head), 0)
        gathered.write(places, descriptor)
    return len(places), []


@contextmanager
def _opened(path: Path, wish: ExportOptions, length: int) -> Iterator[int]:
    """Open a file for ``length`` bytes, and yield its descriptor; raises as ``new_file`` does."""
    with (
        new_file(path, replace=wish.replace, room_bytes=length) as unfinished,
        _created(unfinished) as descriptor,
    ):
        yield descriptor


@contextmanager
def _created(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
