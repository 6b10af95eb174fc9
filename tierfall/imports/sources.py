"""What is at a path: which format, and which files. Of the files only names and first bytes are examined.

A part of a checkpoint is refused, and the message says what makes a whole of the parts.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import ExportFormat
from tierfall.export.structure import CARRIED

INDEX = ".safetensors.index.json"
_METADATA = ".metadata"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK\x03\x04"
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file that torch.save wrote before torch 1.6: a number."""
_EXPECTED = (
    "expected a file of torch.save, a Lightning .ckpt, a .safetensors file, a folder of sharded safetensors with its "
    "index, or a folder of torch.distributed.checkpoint"
)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_BEGINNINGS = {
    b"version https://git-lfs": "is what Git LFS puts in the place of a file: get the file by git lfs pull",
    b"\x80": "is a pickle, which torch.save did not write",
    b"GGUF": "is a GGUF file, which has weights for inference",
    b"\x89HDF": "is an HDF5 file, such as Keras writes",
    b"\x1f\x8b": "is compressed by gzip: decompress it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: decompress it first, or write a step of a tier by tierfall export",
    b"<": "is a page of HTML or XML, not the file that was to be downloaded",
}

_MEGATRON = (
    "is a part of a Megatron checkpoint: Megatron Bridge's AutoBridge.export_ckpt makes a Hugging Face folder of all "
    "parts, which import reads"
)
DEEPSPEED = (
    "is a part of a DeepSpeed checkpoint: its script beside the global_step folders makes model files of all parts, "
    "`python zero_to_fp32.py . OUT --safe_serialization`: import OUT. To keep the optimizer, load the checkpoint by "
    "DeepSpeed, and save it by the adapter (docs/deepspeed.md)"
)
_DCP = "is a part of a checkpoint of torch.distributed.checkpoint: import the folder, with .metadata in it"
_MANY = r"-\d+-of-(?!0*1\.)\d+\."
_PARTS = (
    (
        rf"rank{_MANY}safetensors.*",
        "",
        "is a part of a step of several ranks: write the step by tierfall export, or copy its folder to a tier",
    ),
    (
        rf".*{_MANY}safetensors",
        "",
        "is a shard of a model: import the index of all shards (*.safetensors.index.json), or the folder with it",
    ),
    (
        rf".*{_MANY}(bin|pt|pth)|.*\.bin\.index\.json",
        "",
        "is a part of a model in shards of torch.save, with an index that import does not read: load the folder by "
        "from_pretrained, write safetensors by save_pretrained(OUT), and import OUT",
    ),
    (
        r"consolidated\.\d+\.pth",
        "consolidated.01.pth",
        "is a part of a model in shards of tensor parallelism: transformers' convert_llama_weights_to_hf.py makes a "
        "folder of safetensors of all parts, which import reads",
    ),
    (
        r"zero_to_fp32\.py|(bf16_)?zero_pp_rank_.*|.*_(model|optim)_states\.pt",
        "",
        DEEPSPEED,
    ),
    (r"latest_checkpointed_iteration\.txt|(model_optim_rng|distrib_optim)\.pt", "", _MEGATRON),
    (r"common\.pt", _METADATA, _MEGATRON),
    (
        r"meta\.pt",
        _METADATA,
        "is a part of a checkpoint that Lightning has sharded: `python -m "
        "lightning.pytorch.utilities.consolidate_checkpoint FOLDER` makes one file of all parts, which import reads",
    ),
    (r".*\.distcp", "", _DCP),
    (re.escape(CARRIED), _METADATA, _DCP),
)
"""Files that are parts of a checkpoint, or beside such parts: the pattern of their names, a file that is beside them
then, and the message."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint of another program: ``path`` is its file, the index of its shards, or the folder of DCP."""

    format: ExportFormat
    path: Path


def find_source(path: Path) -> Source:
    """Find the one checkpoint at a path. Raises ConfigError where there is none, a part of one, or several, or its
    format is unknown."""
    try:
        if path.is_dir():
            return _in_folder(path)
        check_file(path)
        if path.name == _METADATA:
            return _in_folder(path.parent, only=path)
        if reason := _part(path):
            raise ConfigError(f"import: {path} {reason}")
        return Source(_format_of(path), path)
    except OSError as error:
        raise unreadable(path, error) from error


def check_file(path: Path) -> None:
    """Raise ConfigError unless a path is a file, whose bytes can be read without a wait, and OSError if that cannot be
    examined."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise ConfigError(f"import: {path} is {_KINDS.get(kind, 'something else')}, not a file")


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read, which may well be good."""
    return ConfigError(f"import: {path} cannot be read: {error.strerror or error}")


def _part(path: Path) -> str:
    """Return the message about a file that is a part of a checkpoint; empty if it is none."""
    for pattern, beside, message in _PARTS:
        if re.fullmatch(pattern, path.name) and (path.parent / beside).exists():
            return message
    return ""


def _in_folder(folder: Path, only: Path | None = None) -> Source:
    names = sorted(path for path in folder.iterdir() if path.is_file())
    parts = {path: reason for path in names if (reason := _part(path))}
    whole = [path for path in names if path not in parts]
    indices = [path for path in whole if path.name.endswith(INDEX)]
    found = [path for path in whole if path.name == _METADATA] + indices
    if not indices:
        found += [path for path in whole if path.suffix == ".safetensors"]
    found += [path for path in whole if path.suffix in _TORCH_SUFFIXES]
    if only is not None:
        found = [path for path in found if path == only]
    of_dcp = bool(found) and found[0].name == _METADATA
    part = next((p for p in parts if not found or (of_dcp and parts[p] != _DCP)), None)
    if part is not None:
        raise ConfigError(f"import: {folder}: {part.name} {parts[part]}")
    if not found:
        raise ConfigError(f"import: {folder} holds no checkpoint that can be imported: {_EXPECTED}")
    if len(found) > 1:
        shown = ", ".join(path.name for path in found[:8]) + (", ..." if len(found) > 8 else "")
        raise ConfigError(
            f"import: {folder} holds {len(found)} checkpoints: {shown}; name one of them"
        )
    if of_dcp:
        return Source(ExportFormat.DCP, folder)
    return Source(_format_of(found[0]), found[0])


def _format_of(path: Path) -> ExportFormat:
    if path.name.endswith(INDEX):
        return ExportFormat.SAFETENSORS
    with open(path, "rb") as file:
        first = file.read(32)
    if first.startswith(_ZIP) or _MAGIC[2:] in first or (first and _MAGIC.startswith(first)):
        return ExportFormat.TORCH
    if first[8:9] == b"{":
        return ExportFormat.SAFETENSORS
    known = next((text for start, text in _BEGINNINGS.items() if first.startswith(start)), "")
    shown = first[:9].hex() or "it is empty"
    found = known or f"has no known format ({len(first[:9])} bytes read: {shown})"
    raise ConfigError(f"import: {path} {found}: {_EXPECTED}")
