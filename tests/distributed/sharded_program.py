"""What one rank does that trains a model which several ranks hold together."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tierfall
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


def train(folder: str, layout: str, until: int, save: bool = True, **changes: Any) -> Any:
    """Train until a step, and return a digest of the whole model and its optimizer's moments; and each one's norm after
    another step, which is not saved."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    model = make_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tierfall.open(program.config(folder, run="one", **changes)) as ckpt:
        own = tierfall.item(int(os.environ["RANK"]), on_resize="per_rank")
        state = {"model": model, "optimizer": optimizer, "own": own}
        report = ckpt.restore(state)
        first = report.step + 1 if report else 1
        for step in range(first, until + 1):
            _train_one(model, optimizer, step)
            if save:
                handle = ckpt.save(step, state)
        if save and first <= until:
            handle.wait("pfs", 30)
        lazy = ckpt.statistics().lazy_saves if save else 0
        digest = _digest(model, optimizer)
        # Not after the run is closed: a gloo group that goes with DDP's last work still in its hands hangs, in torch.
        _train_one(model, optimizer, until + 1)
        norms = [whole.double().norm().item() for whole in _wholes(model, optimizer)]
    if WORLD > 1:
        dist.destroy_process_group()
    return {"first": first, "digest": digest, "lazy": lazy, "next": norms}


def load_into_run(folder: str, layout: str) -> Any:
    """Load as a dict, into models of another layout, and go on: returns the digest of the parameters, and the next
    step that was saved."""
    dist.init_process_group("gloo")
    with tierfall.open(program.config(folder, run="one")) as ckpt:
        found = ckpt.load()
        assert found is not None
        report, loaded = found
        wholes = [loaded["model"][name] for name, _ in make_model("plain").named_parameters()]
        state = loaded["optimizer"]["state"]
        wholes += [state[n][key] for n in state for key in ("step", "exp_avg", "exp_avg_sq")]
        mine = loaded["own"]
        ckpt.save(report.step + 1, {"model": make_model(layout)}).wait("pfs", 30)
    dist.destroy_process_group()
    return {"digest": _digest_of(wholes), "own": mine, "step": report.step}


def _train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_dcp(folder: str, layout: str) -> Any:
    """Load an exported folder by stock DCP into a fresh model and optimizer, and return the same digest."""
    dist.init_process_group("gloo")
    model = make_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    digest = _digest(model, optimizer)
    dist.destroy_process_group()
    return digest


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
