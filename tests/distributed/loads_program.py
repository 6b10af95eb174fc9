"""What one rank does in tests, and in the benchmark, of loads by several ranks."""

from __future__ import annotations

import faulthandler
import resource
import time
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.distributed import killing, program, pulls_program
from tierfall.core.restore.pulls import PullNetwork
from tierfall.errors import TierfallError
from tierfall.tiers.stored import StoredTier

RANK = program.RANK
read = {"bytes": 0}


def cpu_s() -> float:
    """Return the CPU seconds of this process, with all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def count_reads(tier: str) -> None:
    """Count the bytes of images that this process reads from a tier."""
    read_into, read_cached = StoredTier.read_into, StoredTier.read_cached

    def counted(self: StoredTier, *args: Any, **more: Any) -> None:
        read_into(self, *args, **more)
        read["bytes"] += args[3].nbytes * (self.name == tier)

    def counted_cached(self: StoredTier, *args: Any, **more: Any) -> bool:
        found = read_cached(self, *args, **more)
        read["bytes"] += (args[3] - args[2]) * (found and self.name == tier)
        return found

    StoredTier.read_into = counted  # type: ignore[method-assign]
    StoredTier.read_cached = counted_cached  # type: ignore[method-assign]


def save_tensors(folder: str, count: int, tensor_bytes: int, **changes: Any) -> None:
    """Save tensors, each of which has its number everywhere."""
    state = {f"w{i}": torch.full((tensor_bytes,), i % 251, dtype=torch.uint8) for i in range(count)}
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        ckpt.save(1, {**state, "rng": None}).wait("pfs", timeout=300)


def load(
    folder: str, part: int = 1, victims: Any = (), max_wait: str = "60s", **how: Any
) -> dict[str, Any]:
    """Load all tensors, or one in ``part``; ``victims`` die as they serve others."""
    if RANK in victims:
        killing.at(PullNetwork, "_load", 3, killing.kill_self)
    only = [f"w{i}" for i in range(RANK % part, 64, part)] if part > 1 else None
    before = read["bytes"]
    host = {"name": "host", "kind": "host", "folder": f"{folder}/memory"}
    disk = {"name": "disk", "kind": "file", "path": f"{folder}/pfs", "shared": True}
    config = {"run": "many", "max_wait": max_wait, "tiers": [host, disk]}
    began, used = time.monotonic(), cpu_s()
    try:
        loaded = tierfall.load(config, only=only, **how)
    except TierfallError as error:
        return {"error": type(error).__name__, "text": str(error)}
    seconds, cpu = time.monotonic() - began, cpu_s() - used
    Path(folder, f"loaded-{RANK}").touch()
    while not Path(folder, "end").exists():
        time.sleep(0.01)
    tensors = {name: tensor for name, tensor in loaded.items() if name[0] == "w"}
    good = all(bool((tensor == int(name[1:]) % 251).all()) for name, tensor in tensors.items())
    taken = read["bytes"] - before
    return {"good": good, "tensors": len(tensors), "read": taken, "seconds": seconds, "cpu": cpu}


def load_in(
    folder: str, ways: list[dict[str, Any]], failing: int | None = None
) -> list[dict[str, Any]]:
    """Load in one way after the other, on one rank after a load that fails there alone."""
    count_reads("disk")
    if failing == RANK:
        assert "nowhere" in load(folder, group=True, map_location="nowhere")["text"]
    return [load(folder, group=True, **how) for how in ways]


def load_from_slow(folder: str, bytes_per_s: float, **how: Any) -> dict[str, Any]:
    """The same, once the benchmark says so, from a tier of which all processes read at a rate."""
    pulls_program.slow_down("disk", Path(folder, "next-read"), bytes_per_s)
    count_reads("disk")
    Path(folder, f"ready-{RANK}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return load(folder, **how)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(300)  # into the log of a rank that hangs
    program.main(globals())
