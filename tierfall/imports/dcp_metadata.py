"""Reading the ``.metadata`` of torch.distributed.checkpoint (DCP), a pickle, without running code of it.

A pickle names the classes and functions that it calls. Each name that DCP's metadata has is replaced by a stand-in of
this module, and any other is refused: no class and no function of the pickle's choice is found, so none is called.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tierfall.core.format.documents import sha256
from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.imports.sources import unreadable

_BYTES_MAX = 1 << 30


class Record:
    """Stands for an object of DCP: its members, by name; of an object that keeps a tuple, ``members``."""

    members: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # of slots
        if isinstance(state, tuple):
            self.members = state
        else:
            self.__dict__.update(state)


class MetadataRecord(Record):
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: Any = None


class PropertiesRecord(Record):
    """Its ``members`` begin with the dtype."""


class TensorRecord(Record):
    properties: PropertiesRecord
    size: tuple[int, ...]
    chunks: list[ChunkRecord]


class BytesRecord(Record):
    pass


class ChunkRecord(Record):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class IndexRecord(Record):
    fqn: str
    offset: tuple[int, ...] | None = None
    index: int | None = None

    def __hash__(self) -> int:
        return id(self)  # a dict of them is filled before they have members


class StorageRecord(Record):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


class _Ignored(Record):
    def __init__(self, *args: Any) -> None:
        pass


def _ignored(*args: Any) -> None:
    """Stand for a function whose result is not needed."""


def _as_tuple(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items)


_METADATA = "torch.distributed.checkpoint.metadata"
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA, "Metadata"): MetadataRecord,
    (_METADATA, "TensorStorageMetadata"): TensorRecord,
    (_METADATA, "BytesStorageMetadata"): BytesRecord,
    (_METADATA, "TensorProperties"): PropertiesRecord,
    (_METADATA, "ChunkStorageMetadata"): ChunkRecord,
    (_METADATA, "MetadataIndex"): IndexRecord,
    (_METADATA, "StorageMeta"): _Ignored,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): PropertiesRecord,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageRecord,
    ("torch", "Size"): _as_tuple,
    ("torch.serialization", "_get_layout"): _ignored,
    ("collections", "OrderedDict"): OrderedDict,
    **{("pathlib", name): _Ignored for name in ("Path", "PosixPath", "WindowsPath")},
    **{("pathlib._local", name): _Ignored for name in ("Path", "PosixPath", "WindowsPath")},
}
_DTYPES = {("torch", str(v)[6:]): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class _Unpickler(pickle._Unpickler):
    """In Python: the one in C allocates as many places as a pickle claims to have objects."""

    def find_class(self, module: str, name: str) -> Any:
        found = _DTYPES.get((module, name)) or _STAND_INS.get((module, name))
        if found is None:
            raise ConfigError(
                f"it names {module}.{name}, which DCP's metadata has not, and nothing of it was run"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise ConfigError("it has a persistent id, which DCP's metadata has not")


def read_metadata(path: Path) -> tuple[MetadataRecord, str]:
    """Read DCP's metadata, and return it with the digest of its bytes. Raises ConfigError where it names anything but
    DCP's own classes, IntegrityError where it is damaged."""
    try:
        size = path.stat().st_size
        if size > _BYTES_MAX:
            raise ConfigError(
                f"import: {path} has {size} bytes, more than the limit of {_BYTES_MAX}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except ConfigError as error:
        raise ConfigError(f"import: {path}: {error}") from None
    except Exception as error:
        raise IntegrityError(f"import: {path} is damaged: {str(error)[:200]}") from error
    if not isinstance(found, MetadataRecord) or not isinstance(
        getattr(found, "state_dict_metadata", None), dict
    ):
        raise IntegrityError(f"import: {path} is no metadata of torch.distributed.checkpoint")
    return found, sha256(data)
