"""What one rank of a test's job does: functions by name, each given a folder and arguments, each returning a value."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall
from tests.contract import of_ranks
from tests.contract.kit import equal
from tests.distributed import killing

RANK = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
NODE = os.environ.get("GROUP_RANK") or os.environ["SLURM_NODEID"]


def config(folder: str, **changes: Any) -> dict[str, Any]:
    """That of the contract's ranks. What the nodes share of ``nvme``, they find out; the wait is that of a loaded
    machine, for all to start."""
    nvme = {"shared": None, **changes.pop("nvme", {})}
    return of_ranks.config(
        folder, NODE, **{"run": "many", "max_wait": "60s", "nvme": nvme, **changes}
    )


def make_state(step: int) -> dict[str, Any]:
    """A state that differs from rank to rank and from step to step."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return {
        "weights": {f"w{i}": torch.randn(100 + RANK, 50, generator=generator) for i in range(4)},
        "extra": {"step": step, "rank": RANK},
        "rng": None,
    }


def train(
    folder: str,
    steps: list[int],
    victim: int = -1,
    point: str = "",
    call: int = 1,
    **changes: Any,
) -> Any:
    """Go on from where the run is, and save these steps; ``victim`` is killed at a point. What a handle
    says is durable is noted in a file before the next step."""
    if victim == RANK:
        killing.at_point(point, call, killing.kill_self)
    noted = Path(folder, f"durable-{RANK}")
    with tierfall.open(config(folder, **changes)) as ckpt:
        state = make_state(0)
        report = ckpt.restore(state)
        if report is not None and not equal(state, make_state(report.step)):
            raise AssertionError(f"step {report.step} is not what was saved")
        for step in [s for s in steps if report is None or s > report.step]:
            handle = ckpt.save(step, make_state(step))
            ckpt.wait_captured()
            handle.wait("nvme", 30)
            handle.wait("pfs", 30)
            with noted.open("a") as file:
                file.write(f"{step}\n")
                file.flush()
                os.fsync(file.fileno())
        return report and report.step


def main(functions: dict[str, Any] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s")
    function: Callable[..., Any] = (functions or globals())[sys.argv[1]]
    try:
        answer = function(**json.loads(sys.argv[2]))
    except Exception as error:
        logging.exception("it ends")
        answer = {"error": type(error).__name__, "text": str(error)}
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
