"""torch.distributed.checkpoint: on the caller's thread, in a thread and in a process of its own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.peers.system import Place, System, make_durable
from benchmarks.workload import Workload

THREADS = 2


def join_alone() -> None:
    """Open a process group of this process alone, for what does not work without one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


class Dcp(System):
    key = "dcp"
    name = "DCP save"
    saves_in_place = True

    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self.target, thread_count=THREADS)

    def save(self) -> None:
        save(self.state, storage_writer=self._writer(), no_dist=True)

    def wait(self) -> None:
        make_durable(self.target)

    def load(self) -> None:
        reader = FileSystemReader(self.target)
        load(self.state, storage_reader=reader, no_dist=True)


class _Async(Dcp):
    """With a stager that is kept, and with it the memory that it copies into."""

    saves_in_place = False
    how: ClassVar[AsyncCheckpointerType]
    _saved: Future[Any] | None = None

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        on_gpu = work.device != "cpu"
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=self.how is AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._stager = DefaultStager(options)

    def take_memory(self) -> None:
        self._stager.stage(self.state)

    def save(self) -> None:
        if self._saved is not None:
            self.wait()
        found = async_save(
            self.state,
            storage_writer=self._writer(),
            async_checkpointer_type=self.how,
            async_stager=self._stager,
            no_dist=True,
        )
        assert isinstance(found, Future)  # the answer where the caller's thread has staged
        self._saved = found

    def wait(self) -> None:
        if self._saved is not None:
            self._saved.result()
            make_durable(self.target)
            self._saved = None

    def close(self) -> None:
        self._stager.close()


class DcpThread(_Async):
    key = "dcp-thread"
    name = "DCP async, thread, kept stager"
    how = AsyncCheckpointerType.THREAD


class DcpProcess(_Async):
    """Its stager's memory is shared with the process that writes."""

    key = "dcp-process"
    name = "DCP async, process"
    how = AsyncCheckpointerType.PROCESS

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        join_alone()
