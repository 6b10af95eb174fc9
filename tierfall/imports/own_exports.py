"""Reading what ``tierfall export`` wrote: exactly, by the structure that it carries, and without a pickle.

A whole step as safetensors is an image. Files of torch.save and DCP folders carry one (``tierfall.export.structure``),
which names the tensors that are in the file or folder itself.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierfall.core.format.records import HEADER_BYTES_MAX
from tierfall.core.image.header import ImageHeader, StoredTensor, read_header
from tierfall.core.image.layout import DATA_ALIGNMENT_BYTES, LENGTH_BYTES
from tierfall.core.image.tree import MapNode, ValueNode
from tierfall.core.load.choices import renamed
from tierfall.core.state.view import StateView
from tierfall.core.tensors import names
from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.export.structure import CARRIED, PLACES, WRITTEN_WITH, Structure
from tierfall.imports.dcp_files import DcpFolder
from tierfall.imports.sources import zip_members

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member of a zip file: the lengths of the name and the field that follow it."""

Find = Callable[[StoredTensor, str], torch.Tensor]
"""Returns a tensor of the file or folder by its name there."""


def read_image(path: Path, entry: str | None) -> StateView:
    """Return the state of an image. Raises ConfigError for one of several ranks'."""
    size = path.stat().st_size
    header, data = _image_at(path, 0, size)
    if header.written_by_others or not header.complete:
        raise ConfigError(
            f"import: {path} is the image of one of several ranks: write their step by tierfall export"
        )

    def find(stored: StoredTensor, place: str) -> torch.Tensor:
        raise _damaged(path, stored.name)

    return _view(header, data, find, entry)


def read_own_torch(path: Path, entry: str | None) -> StateView | None:
    """Return the state of a file that ``tierfall export`` wrote; None for any other file."""
    members = zip_members(path)
    if CARRIED not in members:
        return None
    mapped = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def find(stored: StoredTensor, place: str) -> torch.Tensor:
        start, size = _place_of(path, members.get(f"data/{place}"))
        if size != stored.length:
            raise _damaged(path, stored.name)
        return _laid_out(mapped[start : start + size], stored)

    header, data = _image_at(path, *_place_of(path, members[CARRIED]))
    return _view(header, data, find, entry)


def read_own_dcp(folder: Path, dcp: DcpFolder, entry: str | None) -> StateView | None:
    """Return the state of a folder that ``tierfall export`` wrote; None for any other folder, and if another program
    has saved into it since. ``dcp.load`` returns the bytes of its tensors."""
    path = folder / CARRIED
    if not path.is_file():
        return None

    def find(stored: StoredTensor, place: str) -> torch.Tensor:
        found = dcp.entry(place)
        if (
            not isinstance(found, torch.Tensor)
            or found.dtype != stored.dtype
            or found.shape != stored.shape
        ):
            raise _damaged(path, stored.name)
        return found

    header, data = _image_at(path, 0, path.stat().st_size)
    if _value(header, WRITTEN_WITH) != dcp.digest:
        return None
    return _view(header, data, find, entry)


def _view(header: ImageHeader, data: torch.Tensor, find: Find, entry: str | None) -> StateView:
    """Return the state of an image whose tensors are in ``data``, or found; a single entry is named ``entry``."""
    places = _value(header, PLACES) or []
    tops = {k: node for k, node in header.tree.entries if k not in (PLACES, WRITTEN_WITH)}
    others = [position for position, t in enumerate(header.tensors) if t.writers]
    if not isinstance(places, list) or len(places) != len(others):
        raise _damaged(header.what, "its table of tensors")
    place_of = dict(zip(others, places, strict=True))
    header = replace(header, tree=MapNode("dict", tuple(tops.items())))
    if entry is not None and len(tops) == 1:
        header = renamed(header, {names.component(key): entry for key in tops})
    structure = Structure(header, header.tree.entries)
    sources = []
    for position in structure.positions:
        stored = header.tensors[position]
        place = place_of.get(position)
        sources.append(data[stored.start : stored.end] if place is None else find(stored, place))
    return structure.view(sources)


def _value(header: ImageHeader, key: str) -> Any:
    """Return a plain value of the top; None if there is none of that key."""
    node = dict(header.tree.entries).get(key)
    return header.values[node.number] if isinstance(node, ValueNode) else None


def _image_at(path: Path, start: int, size: int) -> tuple[ImageHeader, torch.Tensor]:
    """Return the header and the mapped data of an image of ``size`` bytes within a file."""
    with open(path, "rb") as file:
        file.seek(start)
        head = file.read(min(size, LENGTH_BYTES))
        length = int.from_bytes(head, "little")
        head += file.read(
            max(0, min(size - LENGTH_BYTES, length, HEADER_BYTES_MAX + DATA_ALIGNMENT_BYTES))
        )
    header = read_header(head, image_bytes=size, what=f"import: {path}")
    mapped = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return header, mapped[start + header.data_start : start + size]


def _place_of(path: Path, member: zipfile.ZipInfo | None) -> tuple[int, int]:
    """Return offset and size of a member's bytes in a zip file. Raises IntegrityError where they are not in it."""
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise _damaged(path, "a member of the zip file")
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        head = file.read(_LOCAL_HEADER.size)
        end = os.fstat(file.fileno()).st_size
    if len(head) == _LOCAL_HEADER.size:
        start = member.header_offset + len(head) + sum(_LOCAL_HEADER.unpack(head))
        if start + member.file_size <= end:
            return start, member.file_size
    raise _damaged(path, member.filename)


def _laid_out(flat: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return the tensor of these bytes, which are in the order that it had in memory."""
    if stored.strides is None:
        return flat
    if flat.storage_offset() % stored.dtype.itemsize:
        flat = flat.clone()
    return flat.view(stored.dtype).as_strided(stored.shape, stored.strides)


def _damaged(what: object, part: str) -> IntegrityError:
    return IntegrityError(f"import: {what}: {part} is missing, or is not what tierfall wrote")
