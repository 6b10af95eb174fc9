"""What Lightning and Orbax do by themselves: Lightning's two plugins, and Orbax's asynchronous checkpointer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from benchmarks.peers.system import Place, System, fill, make_durable
from benchmarks.workload import Workload

LIGHTNING = "lightning.pytorch.plugins.io"


class Lightning(System):
    key = "lightning"
    name = "Lightning"
    module = LIGHTNING
    requirement = "lightning"
    saves_in_place = True
    _plugin: Any

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._plugin = import_module(LIGHTNING).TorchCheckpointIO()

    def save(self) -> None:
        self._plugin.save_checkpoint({"state": self.state}, self.target / "last.ckpt")

    def wait(self) -> None:
        make_durable(self.target)

    def load(self) -> None:
        loaded = self._plugin.load_checkpoint(self.target / "last.ckpt", weights_only=True)
        fill(self.state, loaded["state"])


class LightningAsync(Lightning):
    """It clones every tensor on the caller's thread, and has no call that waits for a save but the end of training."""

    key = "lightning-async"
    name = "Lightning AsyncCheckpointIO"
    saves_in_place = False

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._inner = self._plugin
        self._plugin = import_module(LIGHTNING).AsyncCheckpointIO(self._inner)

    def wait(self) -> None:
        self._plugin.teardown()
        self._plugin = import_module(LIGHTNING).AsyncCheckpointIO(self._inner)
        make_durable(self.target)


class Orbax(System):
    """Of the tensors' memory as NumPy arrays, which Orbax copies before its call returns."""

    key = "orbax"
    name = "Orbax async, NumPy arrays"
    module = "orbax.checkpoint"
    requirement = "orbax-checkpoint"

    def __init__(self, work: Workload, place: Place) -> None:
        super().__init__(work, place)
        self._package = import_module("orbax.checkpoint")
        self._checkpointer = self._package.AsyncCheckpointer(
            self._package.PyTreeCheckpointHandler()
        )

    def save(self) -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in self.state.items()}
        self._checkpointer.save(self.target.resolve(), arrays, force=True)

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
        make_durable(self.target)

    def load(self) -> None:
        loaded = self._checkpointer.restore(self.target.resolve())
        fill(self.state, {name: torch.from_numpy(array) for name, array in loaded.items()})

    def close(self) -> None:
        self._checkpointer.close()
