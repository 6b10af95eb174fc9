"""What one rank does that saves and loads by torch.distributed.checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierfall
from tests.contract.of_ranks import digest_of_training, model_of
from tests.distributed import program
from tests.distributed.program import RANK
from tierfall.integrations.dcp import LazyStager, TierReader, TierSavePlanner, TierWriter

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
PATIENCE_S = 60
WORLD = int(os.environ["WORLD_SIZE"])


def train(
    folder: str, layout: str, steps: int = 2, how: str = "save", save: bool = True, **changes: Any
) -> Any:
    """Load the newest step, train so many more, and save each by DCP; return a digest of the whole model and its
    optimizer's moments."""
    if WORLD > 1 or (how == "process" and steps):
        dist.init_process_group("cpu:gloo" if how == "thread" else "gloo")
    torch.use_deterministic_algorithms(True)
    model = model_of(layout, dist.group.WORLD, WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = dist.new_group(backend="gloo") if how in ("beside", "lazy") else None
    with tierfall.open(program.config(folder, run="one", **changes), process_group=group) as ckpt:
        first = _load(ckpt, model, optimizer)
        for step in range(first, first + steps):
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            future = _save(ckpt, _state(model, optimizer, step), step, how, group) if save else None
            if how == "beside":  # it goes on while the next step is trained
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.zero_grad()
            if future is not None:
                future.result(PATIENCE_S)
        if how == "process":  # nothing has waited for the last tier
            ckpt.drain()
        lazy = ckpt.statistics().lazy_saves
        tiers = [[c.step, sorted(c.copies)] for c in ckpt.checkpoints()]
    digest = digest_of_training(model, optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"first": first, "digest": digest, "lazy": lazy, "tiers": tiers}


def _state(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    found, moments = get_state_dict(model, optimizer)
    return {"model": found, "optim": moments, "own": {"rank": RANK, "step": step}}


def _save(ckpt: tierfall.Checkpointer, state: Any, step: int, how: str, group: Any) -> Any:
    """Save by DCP; return the future of what goes on after the call."""
    writer = TierWriter(ckpt, step=step, until=None if how == "process" else "pfs")
    words: dict[str, Any] = {"storage_writer": writer}
    if how == "cached":
        words["planner"] = TierSavePlanner(enable_plan_caching=True)
    if how in ("save", "cached", "no_dist"):
        dcp.save(state, no_dist=how == "no_dist", **words)
        return None
    if how in ("lazy", "beside"):
        words["async_stager"] = LazyStager(ckpt)
    if how == "beside":
        words["process_group"] = group
    if how == "process":
        words["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        words["planner"] = DefaultSavePlanner()
    return dcp.async_save(state, **words)


def _load(ckpt: tierfall.Checkpointer, model: Any, optimizer: Any) -> int:
    state = _state(model, optimizer, 0)
    if not ckpt.checkpoints():
        return 1
    reader = TierReader(ckpt, values_of=0)
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    same_world = state["own"]["rank"] == RANK
    step: int = state["own"]["step"]
    assert same_world or state["own"]["rank"] == 0, state["own"]
    return step + 1


def part_of_the_ranks(folder: str, **changes: Any) -> Any:
    """Save by a process group that is not the Checkpointer's."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    said = ""
    with tierfall.open(program.config(folder, run="one", **changes)) as ckpt:
        if RANK < 2:
            try:
                writer = TierWriter(ckpt, step=1)
                dcp.save({"w": torch.ones(5)}, storage_writer=writer, process_group=group)
            except CheckpointException as error:
                said = str(error)
        dist.barrier()
    dist.destroy_process_group()
    return said


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """What DCP raises is no Exception; here it is an answer like any other."""

    def call(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except CheckpointException as error:
            raise RuntimeError(str(error)) from error

    return call


if __name__ == "__main__":
    own = (train, part_of_the_ranks)
    program.main({function.__name__: _plainly(function) for function in own})
