"""Reading safetensors: one file, or shards with their index. Tensors are views of the mapped files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from tierfall.core.format.records import HEADER_BYTES_MAX
from tierfall.core.image.header import StoredTensor, read_table
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
        table = dict(sorted(table.items(), key=lambda item: item[1]["data_offsets"]))
        true = json.loads(metadata.get(TRUE_DTYPES, "{}")) | _later_dtypes(table)
        positions = {name: position for position, name in enumerate(table)}
        rows = [[positions[name], *each] for name, each in true.items()]
        stored = read_table(table, rows, size - start)
        flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
        return {each.name: _viewed(flat[each.start : each.end], each) for each in stored}
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # whatever its bytes lead to
        raise IntegrityError(f"import: {path} is damaged, or truncated: {error}") from error


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
