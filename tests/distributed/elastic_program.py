"""What one rank does in jobs that are started again elsewhere, or with another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.contract.kit import equal
from tests.distributed import program
from tests.distributed.program import RANK
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.ranks import rendezvous
from tierfall.core.types.errors import UnreachableError

WORLD = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])


def make_state(step: int, parts: range) -> dict[str, Any]:
    """A tensor for each of the ``parts``, each of which one rank of the first start has, and values that all have."""
    return {
        "weights": {
            f"w{part}": torch.randn(
                3000 + part, generator=torch.Generator().manual_seed(100 * step + part)
            )
            for part in parts
        },
        "extra": {"step": step},
        "rng": None,
    }


def own() -> range:
    return range(RANK, RANK + 1)


def stop_flushes() -> None:
    """No tier takes an image: what is saved is in memory alone."""
    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if ".safetensors" in key:
            raise UnreachableError(f"{key}: nobody answers")
        return real(self, key, **options)

    PosixBackend.create = create  # type: ignore[method-assign]


def wait_whole(ckpt: tierfall.Checkpointer, step: int) -> None:
    """Wait until all ranks have sealed a step."""
    while not any(c.step == step and c.on("host") == "sealed" for c in ckpt.checkpoints()):
        time.sleep(0.01)


def ready(folder: str) -> None:
    Path(folder, f"ready-{RANK}").touch()


def stay(
    folder: str,
    steps: list[int],
    flush: bool = True,
    parts: int = 0,
    **changes: Any,
) -> Any:
    """Save these steps, wait until all ranks have them in memory, or on all tiers with ``flush``; then stay to be
    killed. With ``parts`` each rank has all of these."""
    if not flush:
        stop_flushes()
    mine = range(parts) if parts else own()
    ckpt = tierfall.open(program.config(folder, **changes))
    ckpt.restore(make_state(0, mine))
    for step in steps:
        handle = ckpt.save(step, make_state(step, mine))
        ckpt.wait_captured()
        wait_whole(ckpt, step)
        if flush:
            handle.wait("nvme", 30)
            handle.wait("pfs", 30)
    ready(folder)
    time.sleep(600)


def go_on(
    folder: str,
    parts: int,
    steps: list[int],
    **changes: Any,
) -> Any:
    """Restore what ``parts`` ranks saved, as a whole; with as many ranks, each its own. Then save these steps."""
    mine = own() if parts == WORLD else range(parts)
    with tierfall.open(program.config(folder, **changes)) as ckpt:
        state = make_state(0, mine)
        report = ckpt.restore(state)
        left = ckpt.drain(30).left
        if report is None:
            return {"step": None, "left": left}
        found = {
            "step": report.step,
            "good": equal(state, make_state(report.step, mine)),
            "tiers": sorted({s.tier for s in report.sources}),
            "left": left,
        }
        for step in steps:
            handle = ckpt.save(step, make_state(step, mine))
            ckpt.wait_captured()
            handle.wait("nvme", 30)
            handle.wait("pfs", 30)
        known = ckpt.checkpoints()
        return {**found, "known": [[c.step, c.attempt, sorted(c.copies)] for c in known]}


def relaunched(folder: str, **changes: Any) -> Any:
    """Under a launcher that starts all ranks again: die with nothing flushed, then restore."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stop_flushes()
        ckpt = tierfall.open(program.config(folder, **changes))
        ckpt.save(1, make_state(1, own()))
        ckpt.wait_captured()
        wait_whole(ckpt, 1)
        ready(folder)
        while not all(Path(folder, f"ready-{rank}").exists() for rank in range(WORLD)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    found = go_on(folder, WORLD, [2], **changes)
    Path(folder, f"answer-{RANK}").write_text(json.dumps(found))
    return found


def give_up_on_stall(folder: str, call: str, **changes: Any) -> Any:
    """Rank 0 stands still for good: say how long a call takes to end, and what it says."""
    Path(folder, f"begun-{RANK}").touch()  # a rank that starts slowly is not one that stands still
    while len(list(Path(folder).glob("begun-*"))) < WORLD:
        time.sleep(0.01)
    ckpt = tierfall.open(program.config(folder, **changes))
    ckpt.save(1, make_state(1, own())).wait("pfs", 30)
    ready(folder)
    while not Path(folder, "stalled").exists():
        time.sleep(0.01)
    messages = []
    began = time.monotonic()
    try:
        if call == "restore":
            ckpt.restore(make_state(0, own()))
        else:
            ckpt.close()
    except tierfall.errors.TierfallError as error:
        messages.append(str(error))
    return {"seconds": time.monotonic() - began, "said": messages}


def meet_silence(folder: str, **changes: Any) -> Any:
    """Open, where the launcher's store falls silent."""
    rendezvous.STORE_S = 2.0
    began = time.monotonic()
    try:
        tierfall.open(program.config(folder, **changes))
    except tierfall.errors.TierfallError as error:
        return {"seconds": time.monotonic() - began, "said": str(error)}
    return "it is open"


if __name__ == "__main__":
    program.main(globals())
