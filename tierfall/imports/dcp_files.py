"""Reading a folder of torch.distributed.checkpoint (DCP): its values at once, its tensors one at a time, as needed.

Each tensor and value is a record of ``torch.save`` in one of the folder's files, loaded with ``weights_only``.

``.metadata`` is a pickle, which is read without running code of it. A pickle names the classes and functions that it
calls. Each name that DCP's metadata has is replaced by a stand-in of this module, and any other is refused: no class
and no function of the pickle's choice is found, so none is called.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tierfall.core.format.documents import sha256
from tierfall.core.tensors import dtypes
from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.imports.sources import check_file, load_plain, reading

_Offset = tuple[int, ...]


class DcpFolder:
    """One checkpoint of DCP. Its tensors have dtype and shape alone, and ``load`` returns the one with the bytes for
    each. ``digest`` is that of its metadata."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError and IntegrityError, as ``_read_metadata`` does, and for files that are missing."""
        self._folder = folder
        self._tensors: dict[int, tuple[str, TensorRecord]] = {}
        with reading(self._folder / ".metadata", "is malformed"):
            self._metadata, self.digest = _read_metadata(folder / ".metadata")
            self._records = _records_of(self._metadata)
            records = [record for found in self._records.values() for record in found.values()]
            for file in {str(record.relative_path) for record in records}:
                self._check_file(file)

    def _check_file(self, file: str) -> None:
        if Path(file).name != file:
            raise ConfigError(
                f"import: {self._folder}: its .metadata names {file!r:.80}, outside of it"
            )
        with reading(self._folder / file):
            check_file(self._folder / file)

    def state(self) -> dict[str, Any]:
        """Return all entries, nested as they were saved. Raises as the constructor does."""
        with reading(self._folder / ".metadata", "is malformed"):
            flat = {name: self.entry(name) for name in self._metadata.state_dict_metadata}
            return _nested(flat, self._metadata.planner_data)

    def entry(self, name: str) -> Any:
        """Return the entry of a name: a value, or a tensor. Raises as ``state`` does."""
        with reading(self._folder / ".metadata", "is malformed"):
            entry = self._metadata.state_dict_metadata[name]
            if isinstance(entry, BytesRecord):
                return self._load(name, self._records[name][None])
            if not isinstance(entry, TensorRecord):
                raise TypeError(f"{name!r:.80} is neither a tensor nor a value")
            dtype, shape = entry.properties.members[0], list(entry.size)
            if not isinstance(dtype, torch.dtype) or not dtypes.is_shape(shape):
                raise ValueError(f"{name!r:.80} has no valid dtype or shape")
            self._check_room(name, dtypes.byte_count(dtype, shape))
            standing = torch.empty(shape, dtype=dtype)  # never written to: it takes no memory
            if standing.numel():
                self._tensors[standing.data_ptr()] = name, entry
        return standing

    def _check_room(self, name: str, size: int) -> None:
        """Raise ValueError where a tensor is larger than its records: nothing is allocated for a claim."""
        held = sum(record.length for record in self._records.get(name, {}).values())
        if size > held:
            raise ValueError(f"{name!r:.80} would take {size} bytes; its records have {held}")

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this folder with its bytes, whole; any other tensor as it is. Raises IntegrityError where
        they are damaged."""
        entry = self._tensors.get(tensor.data_ptr())
        if entry is None:  # it has no bytes, or has its own already
            return tensor
        with reading(self._folder / ".metadata", "is malformed"):
            return self._whole(tensor, *entry)

    def _whole(self, tensor: torch.Tensor, name: str, entry: TensorRecord) -> torch.Tensor:
        records = self._records[name]
        if len(entry.chunks) == 1:
            return self._block(name, records, entry.chunks[0].offsets, tensor)
        whole, filled = torch.empty(tensor.shape, dtype=tensor.dtype), 0
        for chunk in entry.chunks:
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            target = whole[place]
            target.copy_(self._block(name, records, chunk.offsets, target))
            filled += math.prod(chunk.sizes)
        if filled != whole.numel():
            raise IntegrityError(f"import: {self._folder}: {name}: its blocks do not make it whole")
        return whole

    def _block(
        self,
        name: str,
        records: Mapping[_Offset | None, Record],
        offsets: _Offset,
        like: torch.Tensor,
    ) -> torch.Tensor:
        record = records.get(tuple(offsets))
        found = None if record is None else self._load(name, record)
        if (
            not isinstance(found, torch.Tensor)
            or found.shape != like.shape
            or found.dtype != like.dtype
        ):
            raise IntegrityError(
                f"import: {self._folder}: {name}: its block at {tuple(offsets)} is missing, or is no tensor of "
                f"{dtypes.name_of(like.dtype)} {tuple(like.shape)}"
            )
        return found

    def _load(self, name: str, record: Record) -> Any:
        """Load one record. Raises ConfigError for one that needs a class, or was transformed."""
        if record.transform_descriptors:
            raise ConfigError(
                f"import: {self._folder}: {name} was transformed by {record.transform_descriptors}, which is not "
                "supported; save it without extensions"
            )
        file = str(record.relative_path)
        path = self._folder / file
        with reading(path), open(path, "rb") as stream:
            stream.seek(record.offset)
            data = stream.read(min(record.length, os.fstat(stream.fileno()).st_size))
        return load_plain(io.BytesIO(data), f"import: {self._folder}: {name} in {file}")


def _records_of(metadata: MetadataRecord) -> dict[str, dict[_Offset | None, Record]]:
    """Return where each entry's bytes are: by name, and by the offset of a tensor's block."""
    found: dict[str, dict[_Offset | None, Record]] = defaultdict(dict)
    for index, record in (metadata.storage_data or {}).items():
        offset = None if index.offset is None else tuple(index.offset)
        if type(record.offset) is not int or type(record.length) is not int or record.offset < 0:
            raise ValueError(f"the record of {index.fqn!r:.80} has no valid place")
        found[index.fqn][offset] = record
    return dict(found)


def _nested(flat: dict[str, Any], paths: Any) -> dict[str, Any]:
    """Nest entries as they were saved: ``paths`` has the keys that lead to each."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        path = tuple((paths or {}).get(name) or (name,))
        if not all(isinstance(key, str | int) for key in path):
            raise TypeError(f"the path of {name!r:.80} is no sequence of keys")
        below = root
        for key in path[:-1]:
            below = below.setdefault(key, {})
            if not isinstance(below, dict):
                raise ValueError(f"{name!r:.80} is below another entry")
        below[path[-1]] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Make lists of the dicts whose keys are indices: DCP flattens lists that hold tensors or mappings."""
    if not isinstance(value, dict):
        return value
    built = {key: _with_lists(child) for key, child in value.items()}
    if (
        built
        and all(type(key) is int for key in built)
        and sorted(built) == list(range(len(built)))
    ):
        return [built[index] for index in range(len(built))]
    return built


# The metadata --------------------------------------------------------------------------------------

_BYTES_MAX = 1 << 30


class Record:
    """Stands for an object of DCP, or for the result of a function. It has the members that the pickle gives it, by
    name; of an object that keeps a tuple, in ``members``."""

    members: tuple[Any, ...] = ()
    planner_data: Any = None
    storage_data: Any = None
    offset: Any = None
    transform_descriptors: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is missing")

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # of slots
        if isinstance(state, tuple):
            self.members = state
        else:
            self.__dict__.update(state)


class MetadataRecord(Record):
    """It has ``state_dict_metadata``, ``planner_data`` and ``storage_data``."""


class TensorRecord(Record):
    """It has ``properties``, whose ``members`` begin with the dtype, ``size`` and ``chunks``."""


class BytesRecord(Record):
    """It stands for a value."""


_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA, "Metadata"): MetadataRecord,
    (_METADATA, "TensorStorageMetadata"): TensorRecord,
    (_METADATA, "BytesStorageMetadata"): BytesRecord,
    **{
        (_METADATA, name): Record
        for name in ("TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): Record,
    (_SHARDED, "TensorProperties"): Record,
    (_SHARDED, "MEM_FORMAT_ENCODING"): Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): Record,
    ("collections", "OrderedDict"): OrderedDict,
    **{("pathlib", name): Record for name in ("Path", "PosixPath", "WindowsPath")},
    **{("pathlib._local", name): Record for name in ("Path", "PosixPath", "WindowsPath")},
}
_DTYPES = {("torch", str(v)[6:]): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class _Unpickler(pickle._Unpickler):
    """In Python: the one in C allocates as many places as a pickle claims to have objects."""

    def find_class(self, module: str, name: str) -> Any:
        found = _DTYPES.get((module, name)) or _STAND_INS.get((module, name))
        if found is None:
            raise ConfigError(
                f"it names {module}.{name}, which is no part of DCP's metadata; no code of it was run"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise ConfigError("it has a persistent id, which DCP's metadata has not")


def _read_metadata(path: Path) -> tuple[MetadataRecord, str]:
    """Read DCP's metadata, and return it with the digest of its bytes. Raises ConfigError where it names anything but
    DCP's own classes, IntegrityError where it is damaged."""
    with reading(path):
        size = path.stat().st_size
        if size > _BYTES_MAX:
            raise ConfigError(
                f"import: {path} has {size} bytes, more than the limit of {_BYTES_MAX}"
            )
        data = path.read_bytes()
        try:
            found = _Unpickler(io.BytesIO(data)).load()
        except ConfigError as error:
            raise ConfigError(f"import: {path}: {error}") from None
    if not isinstance(found, MetadataRecord) or not isinstance(
        getattr(found, "state_dict_metadata", None), dict
    ):
        raise IntegrityError(f"import: {path} is no metadata of torch.distributed.checkpoint")
    return found, sha256(data)
