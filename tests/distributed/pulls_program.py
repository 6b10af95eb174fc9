"""What one rank does in tests of what ranks pull from each other at a restore."""

from __future__ import annotations

import faulthandler
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from tests.contract.kit import equal
from tests.distributed import killing, program
from tierfall.core.copies.chunk_reader import ChunkReader
from tierfall.core.restore.pulls import PullNetwork

RANK, WORLD = program.RANK, int(os.environ["WORLD_SIZE"])


def tensor(name: int) -> torch.Tensor:
    return torch.randn(150, 400, generator=torch.Generator().manual_seed(name))


def replicated(tensors: int) -> dict[str, Any]:
    """What every rank holds alike."""
    return {"weights": {f"w{i}": tensor(i) for i in range(tensors)}}


def part_of(tensors: int) -> dict[str, Any]:
    """The share of it that this rank saves for all."""
    return {"weights": {f"w{i}": tensor(i) for i in range(RANK, tensors, WORLD)}}


def save(folder: str, tensors: int = 8, steps: int = 1, whole: bool = False, **changes: Any) -> Any:
    """Save a share of the tensors on each rank, or all of them."""
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        for step in range(1, steps + 1):
            state = replicated(tensors) if whole else part_of(tensors)
            handle = ckpt.save(step, {**state, "epoch": step, "rng": None})
            ckpt.wait_captured()
        handle.wait(timeout=30)


def save_and_restore(folder: str) -> Any:
    """Save a share of the tensors on each rank, lose what is on the disks of all nodes, and restore all tensors."""
    dist.init_process_group("gloo")
    save(folder)
    dist.barrier()
    if RANK == 0:
        for path in Path(folder).glob("nvme-*/*/*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "tier.json":  # else a file system may not be mounted
                path.unlink()
    dist.barrier()
    try:
        return _restore(None, folder, 8, "default", mine=False)
    finally:
        dist.destroy_process_group()


def restore(
    folder: str,
    tensors: int = 8,
    group: str = "default",
    victim: int = -1,
    how: str = "",
    mine: bool = False,
    **changes: Any,
) -> Any:
    """Restore all tensors on each rank, or its own share; ``victim`` dies, stops, or raises, while it reads."""
    if group != "none":
        dist.init_process_group("gloo")
    given = dist.new_group([*range(WORLD)]) if group == "given" else None
    if victim == RANK:
        _break(how)
    try:
        return _restore(given, folder, tensors, group, mine=mine, **changes)
    finally:
        if group != "none":
            dist.destroy_process_group()


def _restore(
    given: Any, folder: str, tensors: int, group: str, *, mine: bool, **changes: Any
) -> Any:
    began = time.monotonic()
    with tierfall.open(program.config(folder, **changes), process_group=given) as ckpt:
        goal = part_of(tensors) if mine else replicated(tensors)
        state = {"weights": {name: torch.zeros(150, 400) for name in goal["weights"]}}
        try:
            report = ckpt.restore({**state, "epoch": 0, "rng": None})
        except tierfall.errors.TierfallError as error:
            return {
                "error": type(error).__name__,
                "text": str(error),
                "seconds": time.monotonic() - began,
            }
        assert report is not None
        if group != "none":  # the training's own groups are as they were
            dist.all_reduce(torch.ones(1))
        handle = ckpt.save(report.step + 1, {**state, "epoch": 0, "rng": None})
        return {
            "step": report.step,
            "good": equal(state["weights"], goal["weights"]),
            "read": {s.tier: s.bytes for s in report.sources if s.rank is None},
            "got": [[s.tier, s.rank, s.bytes] for s in report.sources if s.rank is not None],
            "bytes": report.bytes,
            "fallbacks": [f"{f.what}: {f.reason}" for f in report.fallbacks],
            "next": handle.step,
        }


def _break(how: str) -> None:
    if how == "dies":
        killing.at(PullNetwork, "_load", 3, killing.kill_self)
    if how == "stops":
        killing.at(PullNetwork, "_load", 3, killing.stop_self)
    if how == "raises":
        killing.at(ChunkReader, "read_from", 3, _raise)


def _raise() -> None:
    raise MemoryError("no more")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(80)  # into the log of a rank that hangs
    program.main(globals())
