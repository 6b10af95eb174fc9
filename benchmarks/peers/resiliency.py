"""nvidia-resiliency-ext: a forked process holds the state as it was, and writes it.

What its own callers do before they fork is done here too: a GPU's tensors are copied to the host, and waited for.
"""

from __future__ import annotations

import multiprocessing
from importlib import import_module
from multiprocessing.context import ForkProcess
from typing import Any

from benchmarks.peers.dcp import THREADS, Dcp, join_alone
from benchmarks.peers.system import Place, make_durable
from benchmarks.workload import Workload

PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"


class Resiliency(Dcp):
    """What it writes is read as any other checkpoint of torch.distributed's."""

    key = "nvrx"
    name = "nvidia-resiliency-ext, fork"
    module = "nvidia_resiliency_ext"
    requirement = "nvidia-resiliency-ext"
    saves_in_place = False
    _plan: Any
    _process: ForkProcess

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        join_alone()
        self._files = import_module(f"{PACKAGE}.filesystem_async")
        self._saver = import_module(f"{PACKAGE}.state_dict_saver")

    def save(self) -> None:
        writer = self._files.FileSystemWriterAsync(self.target, thread_count=THREADS)
        self._plan = self._saver.save_state_dict_async_plan(self.state, writer)
        write, preload, arguments = writer.get_save_function_and_args()
        if self.work.device != "cpu":
            rank, _, queue = arguments
            arguments = [rank, preload(), queue]  # a forked process may not touch the GPU
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=write, args=arguments)
        self._process.start()

    def wait(self) -> None:
        self._process.join()
        if self._process.exitcode != 0:
            raise RuntimeError(f"the writing process ended with {self._process.exitcode}")
        self._saver.save_state_dict_async_finalize(*self._plan)
        make_durable(self.target)
