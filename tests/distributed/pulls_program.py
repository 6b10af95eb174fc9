"""What one rank does in tests of what ranks pull from each other at a restore."""

from __future__ import annotations

import faulthandler
import fcntl
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
from tierfall.tiers.stored import StoredTier

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


def save_large(folder: str, bytes: int, **changes: Any) -> Any:
    """Save one tensor, on one rank."""
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        handle = ckpt.save(1, {"w": large(bytes), "rng": None})
        ckpt.wait_captured()
        handle.wait("pfs", timeout=120)


def restore_from_slow(folder: str, bytes: int, bytes_per_s: float, **changes: Any) -> Any:
    """Restore that tensor on all ranks from ``pfs``, whose reads by all processes take ``bytes_per_s`` together. The
    ranks begin at the same time. Their targets are one memory, to which all of them write the same: as many tensors
    would take the memory of a small machine."""
    dist.init_process_group("gloo")
    slow_down("pfs", Path(folder) / "next-read", bytes_per_s)
    target = torch.from_file(f"{folder}/target", shared=True, size=bytes, dtype=torch.uint8)
    target.zero_()  # a training has touched its memory
    try:
        with tierfall.open(program.config(folder, **changes)) as ckpt:
            dist.barrier()
            began = time.monotonic()
            report = ckpt.restore({"w": target, "rng": None})
            seconds = time.monotonic() - began
            assert report is not None
            dist.barrier()
            return {
                "step": report.step,
                "good": torch.equal(target, large(bytes)) if RANK == 0 else True,
                "seconds": seconds,
                "read": {s.tier: s.bytes for s in report.sources if s.rank is None},
                "got": sum(s.bytes for s in report.sources if s.rank is not None),
            }
    finally:
        dist.destroy_process_group()


def large(bytes: int) -> torch.Tensor:
    return torch.arange(bytes // 8).mul_(0x9E3779B97F4A7C15 - (1 << 64)).view(torch.uint8)


def slow_down(tier: str, clock: Path, bytes_per_s: float) -> None:
    """Let reads of a tier take turns between all processes: each begins when the ones before it have ended at that
    rate. None is of the page cache."""
    real = StoredTier.read_into

    def read_into(self: StoredTier, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        if self.name != tier:
            return
        with clock.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            begins = max(time.monotonic(), float(file.read() or 0.0))
            ends = begins + args[3].nbytes / bytes_per_s
            file.truncate(0)
            file.write(repr(ends))
        time.sleep(max(0.0, ends - time.monotonic()))

    StoredTier.read_into = read_into  # type: ignore[method-assign]
    StoredTier.read_cached = lambda self, *args, **more: False  # type: ignore[method-assign]


def _break(how: str) -> None:
    if how in ("dies", "stops"):
        act = killing.kill_self if how == "dies" else killing.stop_self
        killing.at(PullNetwork, "_load", 3, act, fits=lambda net, by, chunk, *_: chunk[1] > 0)
    if how == "raises":
        killing.at(ChunkReader, "read_from", 3, _raise)


def _raise() -> None:
    raise MemoryError("no more")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(80)  # into the log of a rank that hangs
    program.main(globals())
