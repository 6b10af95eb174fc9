"""A folder of ``torch.distributed.checkpoint``, written by its own writer in one process.

``dcp.load`` reads any block of any tensor of it into any layout. Only an export imports this module: importing DCP is
slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from tierfall.core.types.errors import BackendError
from tierfall.export.output import first_cause


class _DcpWriter(FileSystemWriter):
    """Records the final path of the folder instead of the temporary one."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__(folder, thread_count=1, sync_files=True)  # with more, failures are lost
        self._final = path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


def save_dcp(state: Mapping[str, Any], folder: Path, path: Path) -> dict[int, str]:
    """Write a state into ``folder``, which is renamed to ``path`` later; returns DCP's names of its tensors, by their
    addresses. Raises BackendError if DCP cannot write it, or the OSError or interrupt behind that if DCP reports it."""
    try:
        with warnings.catch_warnings():
            # intended: one process writes
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            metadata = save(dict(state), storage_writer=_DcpWriter(folder, path), no_dist=True)
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise _cause(failures[0], path) from error
    except (ValueError, RuntimeError) as error:
        raise _cause(error, path) from error
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for info in (metadata.storage_data or {}).values():
        if info.offset + info.length > sizes.get(info.relative_path, 0):
            raise BackendError(f"export to {path}: {info.relative_path} is shorter than DCP says")
    named, _ = flatten_state_dict(dict(state))
    tensors = {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and v.numel()}
    return {tensor.data_ptr(): name for name, tensor in tensors.items()}


def _cause(error: BaseException, path: Path) -> BaseException:
    if isinstance(error, RuntimeError) and (first := first_cause(error)) is not None:
        return first
    if isinstance(error, OSError) or not isinstance(error, Exception):
        return error
    return BackendError(f"export to {path}: DCP could not write it: {error}")
