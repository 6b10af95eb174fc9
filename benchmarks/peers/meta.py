"""torch-checkpointing: staged by a thread into kept shared memory, written by a process of its own.

Its direct I/O writes pieces that are not whole blocks, which ext4 refuses, so it is switched off.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from benchmarks.peers.system import Place, System, fill, make_durable
from benchmarks.workload import Workload

KEY = "state"


class TorchCheckpointing(System):
    key = "torch-checkpointing"
    name = "torch-checkpointing"
    module = "torch_checkpointing"
    requirement = "torch-checkpointing"
    _written: Future[Any] | None = None

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        files = import_module("torch_checkpointing.storage.filesystem")
        manager = import_module("torch_checkpointing.checkpoint_manager").CheckpointManager
        storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = manager(manager.Config(storage_config=storage))

    def save(self) -> None:
        self._written = self._manager.save(str(self.target), {KEY: self.state})

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()
        make_durable(self.target)

    def updating(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def load(self) -> None:
        found = self._manager.load(str(self.target), into={KEY: self.state})
        fill(self.state, found[KEY])

    def close(self) -> None:
        self._manager.close()
