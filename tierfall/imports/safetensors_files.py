"""Reading safetensors: one file, or shards with their index. Tensors are views of the mapped files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from tierfall.core.format.records import HEADER_BYTES_MAX
from tierfall.core.image.layout import LAYOUT_MEMBER
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.export.safetensors_files import LATER, TRUE_DTYPES
from tierfall.imports.sources import INDEX, Source, unreadable

_LENGTH_BYTES = 8
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
    try:
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
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # whatever its bytes lead to
        raise IntegrityError(f"import: {path} is no index of safetensors: {error}") from error
    missing = sorted({n for n in weight_map.values() if not (path.parent / n).is_file()})
    if missing:
        raise ConfigError(f"import: {path}: {missing[0]}, which it names, is not beside it")
    return {name: path.parent / file for name, file in weight_map.items()}


def _read_file(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES).ljust(_LENGTH_BYTES, b"\0"))
            if length > min(size - _LENGTH_BYTES, HEADER_BYTES_MAX):
                raise ValueError(f"its header would take {length} bytes of {size}")
            table = json.loads(file.read(length))
        if not isinstance(table, dict):
            raise ValueError("its header is no mapping")
        metadata = table.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is no mapping")
        if LAYOUT_MEMBER in metadata:
            return None
        start = _LENGTH_BYTES + length
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        found = {name: _tensor(flat[start:], name, entry) for name, entry in table.items()}
        _check_offsets([entry["data_offsets"] for entry in table.values()], size - start)
        for name, true in json.loads(metadata.get(TRUE_DTYPES, "{}")).items():
            found[name] = _as_it_was(found[name], name, true)
        return found
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # whatever its bytes lead to
        raise IntegrityError(f"import: {path} is damaged, or truncated: {error}") from error


def _check_offsets(offsets: list[list[int]], size: int) -> None:
    """Raise ValueError unless the tensors are the ``size`` bytes, one after the other, as the format requires."""
    end = 0
    for first, last in sorted(offsets):
        if first != end:
            raise ValueError(f"a tensor begins at {first}, and the one before ends at {end}")
        end = last
    if end != size:
        raise ValueError(f"the tensors end at {end} of {size} bytes")


def _as_it_was(raw: torch.Tensor, name: str, true: Any) -> torch.Tensor:
    """Return a tensor that tierfall wrote as bytes. ValueError where its true dtype and shape are malformed."""
    dtype, shape = dtypes.from_name(true[0]), true[1]
    if dtype is None or not dtypes.is_shape(shape) or dtypes.byte_count(dtype, shape) != raw.nbytes:
        raise ValueError(f"tensor {name!r:.80} has no valid true dtype and shape: {true!r:.80}")
    return _viewed(raw, dtype, shape)


def _tensor(data: torch.Tensor, name: str, entry: Any) -> torch.Tensor:
    """Return one tensor of a file, whose ``data`` are the bytes behind its header. ValueError where it is malformed."""
    if not isinstance(entry, dict) or not dtypes.is_shape(entry.get("shape")):
        raise ValueError(f"tensor {name!r:.80} has no valid shape")
    code, shape = entry.get("dtype"), list(entry["shape"])
    dtype = dtypes.from_code(code)
    for later, (its_code, elements) in LATER.items() if dtype is None else ():
        if its_code == code and shape and shape[-1] % elements == 0:
            dtype, shape[-1] = later, shape[-1] // elements
    if dtype is None:
        raise ValueError(f"tensor {name!r:.80} is of dtype {code!r:.40}, unknown here")
    match entry.get("data_offsets"):
        case [int(start), int(end)] if 0 <= start <= end <= len(data):
            flat = data[start:end]
        case offsets:
            raise ValueError(f"tensor {name!r:.80} is at {offsets!r:.80} of {len(data)} bytes")
    if len(flat) != dtypes.byte_count(dtype, shape):
        raise ValueError(f"tensor {name!r:.80} has {len(flat)} bytes, which is not its shape's")
    return _viewed(flat, dtype, shape)


def _viewed(flat: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()  # an old file, whose header is not padded
    return flat.view(dtype).view(shape)
