"""TorchSnapshot: ``async_take`` returns when the state is staged in memory, and writes on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.peers.system import Place, System, make_durable
from benchmarks.workload import Workload


class TorchSnapshot(System):
    key = "torchsnapshot"
    name = "TorchSnapshot async_take"
    module = "torchsnapshot"
    requirement = "torchsnapshot"
    _pending: Any

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._package = import_module("torchsnapshot")
        self._app_state = {"state": self._package.StateDict(**self.state)}

    def save(self) -> None:
        self._pending = self._package.Snapshot.async_take(str(self.target), self._app_state)

    def wait(self) -> None:
        self._pending.wait()
        make_durable(self.target)

    def load(self) -> None:
        self._package.Snapshot(str(self.target)).restore(self._app_state)
