"""What is at a path, and reading it: files of torch.save, of Lightning and of safetensors.

First only names and first bytes are examined. A part of a checkpoint is refused, and the message says what makes a
whole of the parts. Files of torch.save are read with ``weights_only``: no class of the file is built. Tensors are views
of the mapped files.
"""

from __future__ import annotations

import errno
import json
import pickle
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from tierfall.core.format.records import HEADER_BYTES_MAX
from tierfall.core.image.header import StoredTensor, read_table
from tierfall.core.image.layout import LAYOUT_MEMBER, LENGTH_BYTES
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import ConfigError, IntegrityError, TierfallError
from tierfall.core.types.values import ExportFormat
from tierfall.export.safetensors_files import LATER, TRUE_DTYPES
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
    with reading(path):
        if path.is_dir():
            return _in_folder(path)
        check_file(path)
        if path.name == _METADATA:
            return _in_folder(path.parent, only=path)
        if reason := _part(path):
            raise ConfigError(f"import: {path} {reason}")
        return Source(_format_of(path), path)


def check_file(path: Path) -> None:
    """Raise ConfigError unless a path is a file, whose bytes can be read without a wait, and OSError if that cannot be
    examined."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise ConfigError(f"import: {path} is {_KINDS.get(kind, 'something else')}, not a file")


@contextmanager
def reading(path: Path, fault: str = "is damaged, or truncated") -> Iterator[None]:
    """Raise ConfigError for a file that cannot be read, which may well be good, and IntegrityError, with the ``fault``,
    for whatever else its bytes lead to; errors of tierfall as they are."""
    try:
        yield
    except TierfallError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        raise IntegrityError(f"import: {path} {fault}: {str(error)[:200]}") from error


def unreadable(path: Path, error: OSError) -> ConfigError:
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


# torch.save ----------------------------------------------------------------------------------------

_REFUSED = re.compile(r"(?:GLOBAL|[Cc]lass|function) ([\w.]+)")
_LIGHTNING = "pytorch-lightning_version"
_DEEPSPEED = "ds_version"
_ADVICE = (
    "Load it with weights_only=False where you trust it, and save it again as tensors and plain values, or save it by "
    "Checkpointer.save"
)


def read_torch(path: Path) -> Mapping[Any, Any]:
    """Return the mapping that a file holds, its tensors mapped where the file allows it.

    Raises ConfigError where it needs a class, or holds no mapping; IntegrityError where it is damaged.
    """
    members = zip_members(path)
    if members and "data.pkl" not in members:
        raise ConfigError(f"import: {path} is a zip file that torch.save did not write")
    if "constants.pkl" in members:
        raise ConfigError(
            f"import: {path} is a TorchScript module: load it by torch.jit.load, and torch.save its state_dict()"
        )
    found = load_plain(path, f"import: {path}", mmap=bool(members))
    if isinstance(found, torch.Tensor) or not isinstance(found, Mapping):
        raise ConfigError(
            f"import: {path} holds a {type(found).__name__}; expected a state_dict, or a dict of them"
        )
    if _DEEPSPEED in found:
        raise ConfigError(f"import: {path} {DEEPSPEED}")
    return _of_lightning(found) if _LIGHTNING in found else found


def zip_members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the members of the zip file that torch.save writes, by their names below its folder; none for a file of
    another format. Raises IntegrityError where it is damaged."""
    try:
        if not zipfile.is_zipfile(path):
            return {}
        with zipfile.ZipFile(path) as archive:
            return {info.filename.partition("/")[2]: info for info in archive.infolist()}
    except Exception as error:  # whatever its bytes lead to
        raise _refusal(path, f"import: {path}", error) from error


def load_plain(source: Path | IO[bytes], what: str, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote, by ``weights_only``; ``what`` names it in errors. Raises as ``read_torch`` does."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever its bytes lead to
        raise _refusal(source, what, error) from error


def _refusal(source: Path | IO[bytes], what: str, error: Exception) -> ConfigError | IntegrityError:
    """Return the error for bytes that ``weights_only`` does not load; it names the classes, if that is why."""
    if isinstance(error, OSError) and isinstance(source, Path) and error.errno != errno.EINVAL:
        return unreadable(source, error)  # EINVAL: a seek to where damaged bytes lead
    classes: list[str] = []
    if isinstance(error, pickle.UnpicklingError):
        refused = _REFUSED.search(str(error))
        try:
            classes = sorted(get_unsafe_globals_in_checkpoint(source))
        except (EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            classes = []  # a legacy file, or a damaged one
        classes = classes or ([refused[1]] if refused else [])
    if classes:
        return ConfigError(
            f"{what} holds more than tensors and plain values, and nothing of it was run: {', '.join(classes[:4])}. "
            f"{_ADVICE}"
        )
    why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return IntegrityError(f"{what} is damaged, or truncated: {why}")


def _of_lightning(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return Lightning's entries: the model, its optimizers and schedulers by the usual names, the rest below
    ``lightning``."""
    rest = dict(found)
    state: dict[str, Any] = {"model": rest.pop("state_dict", {})}
    for key, one, many in (
        ("optimizer_states", "optimizer", "optimizers"),
        ("lr_schedulers", "scheduler", "schedulers"),
    ):
        states = rest.pop(key, None) or []
        if len(states) == 1:
            state[one] = states[0]
        elif states:
            state[many] = list(states)
    return {**state, "lightning": rest}


# safetensors ---------------------------------------------------------------------------------------

_INDEX_BYTES_MAX = 256 << 20


def read_safetensors(source: Source) -> dict[str, torch.Tensor] | None:
    """Return the tensors by name; None for an image of tierfall. Raises IntegrityError where a file is damaged,
    ConfigError where it cannot be imported."""
    if not source.path.name.endswith(INDEX):
        return _read_file(source.path)
    files: dict[Path, dict[str, torch.Tensor] | None] = {}
    found = {}
    for name, path in _read_index(source.path).items():
        if path not in files:
            files[path] = _read_file(path)
        tensor = (files[path] or {}).get(name)
        if tensor is None:
            raise IntegrityError(
                f"import: {source.path}: tensor {name!r} is not in {path.name}, where the index has it"
            )
        found[name] = tensor
    return found


def _read_index(path: Path) -> dict[str, Path]:
    with reading(path, "is no index of safetensors"):
        if path.stat().st_size > _INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {_INDEX_BYTES_MAX} bytes")
        weight_map = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("weight_map is no mapping of names to files")
        bad = [
            n for n in weight_map.values() if not n or not isinstance(n, str) or Path(n).name != n
        ]
        if bad:
            raise ValueError(f"{bad[0]!r:.80} is not the name of a file beside the index")
    missing = sorted({n for n in weight_map.values() if not (path.parent / n).is_file()})
    if missing:
        raise ConfigError(f"import: {path}: {missing[0]}, which it names, is not beside it")
    return {name: path.parent / file for name, file in weight_map.items()}


def _read_file(path: Path) -> dict[str, torch.Tensor] | None:
    with reading(path):
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(size - LENGTH_BYTES, HEADER_BYTES_MAX):
                raise ValueError(f"its header would take {length} bytes of {size}")
            table = json.loads(file.read(length))
        if not isinstance(table, dict):
            raise ValueError("its header is no mapping")
        metadata = table.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is no mapping")
        if LAYOUT_MEMBER in metadata:
            return None
        start = LENGTH_BYTES + length
        table = dict(sorted(table.items(), key=lambda item: item[1]["data_offsets"]))
        true = json.loads(metadata.get(TRUE_DTYPES, "{}")) | _later_dtypes(table)
        positions = {name: position for position, name in enumerate(table)}
        rows = [[positions[name], *each] for name, each in true.items()]
        stored = read_table(table, rows, size - start)
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
        return {each.name: _viewed(flat[each.start : each.end], each) for each in stored}


def _later_dtypes(table: dict[str, Any]) -> dict[str, Any]:
    """Make bytes of the tensors of ``table`` whose dtypes only later versions of safetensors have; return their true
    dtypes and shapes."""
    codes = {code: (dtype, elements) for dtype, (code, elements) in LATER.items()}
    true = {}
    for name, entry in table.items():
        if (later := codes.get(entry["dtype"])) is not None:
            dtype, elements = later
            *rows, last = entry["shape"]
            true[name] = [dtypes.name_of(dtype), [*rows, last // elements]]
            start, end = entry["data_offsets"]
            table[name] = {**entry, "dtype": dtypes.RAW_CODE, "shape": [end - start]}
    return true


def _viewed(flat: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    if flat.data_ptr() % stored.dtype.itemsize or flat.storage_offset() % stored.dtype.itemsize:
        flat = flat.clone()  # an old file, whose header is not padded
    return flat.view(stored.dtype).view(stored.shape)
