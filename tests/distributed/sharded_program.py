"""What one rank does that trains a model which several ranks hold together."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed import program

WORLD = int(os.environ["WORLD_SIZE"])


def make_model(layout: str) -> nn.Module:
    """Two layers whose rows no number of ranks divides, laid out as ``layout`` says."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 26), nn.ReLU(), nn.Linear(26, 10))
    match layout:
        case "fsdp":
            _shard(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)))
        case "hsdp":
            names = ("replicate", "shard")
            _shard(model, init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=names))
        case "tp":
            _cut(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))
        case "tp-fsdp":
            mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
            _cut(model, mesh["tp"])
            _shard(model, mesh["dp"])
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _cut(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return _digest_of(_wholes(model, optimizer))


def _digest_of(wholes: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for whole in wholes:
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


def _wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = list(model.parameters())
    for parameter in list(tensors):
        state = optimizer.state[parameter]
        tensors += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach() for t in tensors]


if __name__ == "__main__":
    program.main(globals())
