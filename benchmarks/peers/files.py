"""One file, written on the caller's thread: torch.save and safetensors."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.system import System, fill, make_durable


class TorchSave(System):
    key = "torch"
    name = "torch.save"
    saves_in_place = True

    def save(self) -> None:
        self.target.mkdir(exist_ok=True)
        torch.save(self.state, self.target / "state.pt")

    def wait(self) -> None:
        make_durable(self.target)

    def load(self) -> None:
        fill(self.state, torch.load(self.target / "state.pt", weights_only=True))


class Safetensors(System):
    key = "safetensors"
    name = "safetensors"
    module = "safetensors"
    requirement = "safetensors"
    saves_in_place = True

    def save(self) -> None:
        self.target.mkdir(exist_ok=True)
        save_file(self.state, self.target / "state.safetensors")

    def wait(self) -> None:
        make_durable(self.target)

    def load(self) -> None:
        fill(self.state, load_file(self.target / "state.safetensors", device=self.work.device))
