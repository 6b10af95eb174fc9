"""What one rank does that saves and loads by path, as torch.distributed.checkpoint does."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tierfall
from tests.distributed import program
from tierfall.core.types.errors import StorageFullError
from tierfall.run.checkpointer import open_run_of

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS = 5 * 4 * 3


def path(step: int, run: str = "many") -> str:
    return f"tiers://{run}/step-{step:08d}"


def make_state(step: int) -> dict[str, Any]:
    """A matrix that all ranks hold together, a vector of this rank's own, and a value."""
    whole = torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64) + step
    if WORLD == 1:
        weight: Any = whole
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        weight = distribute_tensor(whole, mesh, [Shard(0)])
    return {"weight": weight, f"own{RANK}": torch.full((1000,), step + RANK / 8), "step": step}


def is_filled(state: dict[str, Any], step: int) -> bool:
    expected = make_state(step)
    return all(
        torch.equal(_local(state[key]), _local(expected[key])) for key in ("weight", f"own{RANK}")
    )


def emptied(step: int) -> dict[str, Any]:
    state = make_state(step)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            _local(value).zero_()
    return state


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(folder: str, saves: list[int], load: int | None = None, **changes: Any) -> Any:
    """Load a step by path, where one is named, save others, and say how it went."""
    dist.init_process_group("gloo")
    answer: dict[str, Any] = {}
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        if load is not None:
            state = emptied(load)
            dcp.load(state, checkpoint_id=path(load))
            answer["loaded"] = is_filled(state, load)
        answer["error"] = ""
        try:
            for step in saves:
                dcp.save(make_state(step), checkpoint_id=path(step))
        except BaseException as failure:  # noqa: BLE001 - CheckpointException is one
            answer["error"] = str(failure)
            saves = []
        answer["whole"] = [
            [c.step, c.attempt, {tier: str(state) for tier, state in c.tiers.items()}]
            for c in ckpt.checkpoints()
        ]
        dist.barrier()
        if saves:
            state = emptied(saves[-1])
            dcp.load(state, checkpoint_id=path(saves[-1]))
            answer["read back"] = is_filled(state, saves[-1])
            answer["files"] = fsspec.filesystem("tiers").ls(path(saves[-1]), detail=False)
        dist.barrier()
    dist.destroy_process_group()
    return answer


def save_in_thread(folder: str, **changes: Any) -> Any:
    """Save in a thread, and change the state meanwhile."""
    dist.init_process_group("gloo")
    with tierfall.open(program.config(folder, **changes)):
        for step in (1, 2):
            state = make_state(step)
            done = dcp.async_save(state, checkpoint_id=path(step))
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    _local(value).zero_()
            done.result(60)
        state = emptied(2)
        dcp.load(state, checkpoint_id=path(2))
        filled = is_filled(state, 2)
        dist.barrier()
    dist.destroy_process_group()
    return filled


def save_in_process(folder: str, config: str, open_here: bool = False) -> Any:
    """Save in a child process, twice, and load here; ``open_here``: this process has a Checkpointer of the run."""
    os.environ["TIERFALL_CONFIG"] = config
    dist.init_process_group("gloo")
    ckpt = tierfall.open(config) if open_here else None
    error = ""
    try:
        for step in (1, 2):
            done = dcp.async_save(
                make_state(step),
                checkpoint_id=path(step),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            done.result(60)
    except BaseException as failure:  # noqa: BLE001 - CheckpointException is one
        error = str(failure)
    filled = []
    for step in (1, 2) if not error else ():
        state = emptied(step)
        dcp.load(state, checkpoint_id=path(step))
        filled.append(is_filled(state, step))
    dist.barrier()
    if ckpt is not None:
        ckpt.close()
    dist.destroy_process_group()
    return {"filled": filled, "error": error}


def alone_saves(folder: str, saver: int) -> Any:
    """One rank saves for all (no_dist); the others only have their Checkpointer open."""
    with tierfall.open(program.config(folder)) as ckpt:
        if saver == RANK:
            dcp.save({"w": torch.full((100,), 7.0)}, checkpoint_id=path(1), no_dist=True)
        while not any(c.tiers.get("pfs") == "committed" for c in ckpt.checkpoints()):
            time.sleep(0.01)
        state = {"w": torch.zeros(100)}
        dcp.load(state, checkpoint_id=path(1), no_dist=True)
    return state["w"][0].item()


def one_fails(folder: str) -> Any:
    """Rank 1 fails as it writes its file. Then all save that step again, and it is whole."""
    dist.init_process_group("gloo")
    with tierfall.open(program.config(folder, max_wait="10s")) as ckpt:
        saves = open_run_of(ckpt).by_path
        real = saves.create
        if RANK == 1:

            def create(step: int, name: str) -> Any:
                file = real(step, name)
                file.write = _full  # type: ignore[method-assign, assignment]
                return file

            saves.create = create  # type: ignore[method-assign]
        error = ""
        try:
            dcp.save(make_state(1), checkpoint_id=path(1))
        except BaseException as failure:  # noqa: BLE001 - CheckpointException is one
            error = str(failure)
        deadline = time.monotonic() + 10
        while saves.is_staged(1) and time.monotonic() < deadline:
            time.sleep(0.01)
        staged = saves.is_staged(1)
        exists = fsspec.filesystem("tiers").exists(path(1))
        dist.barrier()
        saves.create = real  # type: ignore[method-assign]
        dcp.save(make_state(1), checkpoint_id=path(1))
        state = emptied(1)
        dcp.load(state, checkpoint_id=path(1))
        dist.barrier()
        answer = {"error": error, "staged": staged, "exists": exists, "again": is_filled(state, 1)}
    dist.destroy_process_group()
    return answer


def _full(data: object) -> int:
    raise StorageFullError("no space left")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    program.main(globals())
