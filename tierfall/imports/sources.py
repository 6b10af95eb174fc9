"""What is at a path: which format, and which files. Of the files only names and first bytes are examined."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tierfall.core.types.errors import ConfigError

_INDEX = ".safetensors.index.json"
_METADATA = ".metadata"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_EXPECTED = (
    "expected a file of torch.save, a Lightning .ckpt, a .safetensors file, a folder of sharded safetensors with its "
    "index, or a folder of torch.distributed.checkpoint"
)


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of another program: ``path`` is its file, the index of its shards, or the folder of DCP."""

    format: Format
    path: Path

    @property
    def is_index(self) -> bool:
        return self.path.name.endswith(_INDEX)


def find_source(path: Path) -> Source:
    """Find the one checkpoint at a path. Raises ConfigError where there is none, or several, or its format is
    unknown."""
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.name == _METADATA:
            return _in_folder(path.parent, only=path)
        return Source(_format_of(path), path)
    except OSError as error:
        raise ConfigError(f"import: {path} cannot be read: {error.strerror}") from error


def _in_folder(folder: Path, only: Path | None = None) -> Source:
    names = sorted(path for path in folder.iterdir() if path.is_file())
    indices = [path for path in names if path.name.endswith(_INDEX)]
    found = [path for path in names if path.name == _METADATA] + indices
    if not indices:
        found += [path for path in names if path.suffix == ".safetensors"]
    found += [path for path in names if path.suffix in _TORCH_SUFFIXES]
    if only is not None:
        found = [path for path in found if path == only]
    if not found:
        raise ConfigError(f"import: {folder} holds no checkpoint that can be imported: {_EXPECTED}")
    if len(found) > 1:
        shown = ", ".join(path.name for path in found[:8]) + (", ..." if len(found) > 8 else "")
        raise ConfigError(
            f"import: {folder} holds {len(found)} checkpoints: {shown}; name one of them. Shards of safetensors need "
            "their index beside them"
        )
    if found[0].name == _METADATA:
        return Source(Format.DCP, folder)
    return Source(_format_of(found[0]), found[0])


def _format_of(path: Path) -> Format:
    if path.name.endswith(_INDEX):
        return Format.SAFETENSORS
    with open(path, "rb") as file:
        first = file.read(9)
    if first.startswith((_ZIP, _PICKLE)):
        return Format.TORCH
    if len(first) == 9 and first[8:] == b"{":
        return Format.SAFETENSORS
    raise ConfigError(
        f"import: {path} has no known format ({len(first)} bytes read: {first.hex() or 'it is empty'}): {_EXPECTED}"
    )
