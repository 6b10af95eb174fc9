"""What one rank of a test's job does: functions by name, each given a folder and arguments, each returning a value."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierfall

RANK = int(os.environ["RANK"])


def config(folder: str, **changes: Any) -> dict[str, Any]:
    node = os.environ["GROUP_RANK"]
    root = Path(folder)
    return {
        "run": "many",
        "max_wait": changes.pop("max_wait", "20s"),
        "chunk": "64KiB",
        "tiers": [
            {
                "name": "host",
                "kind": "host",
                "folder": str(root / f"memory-{node}"),
                **changes.pop("host", {}),
            },
            {
                "name": "nvme",
                "kind": "file",
                "path": str(root / f"nvme-{node}"),
                **changes.pop("nvme", {}),
            },
            {
                "name": "pfs",
                "kind": "file",
                "path": str(root / "pfs"),
                "shared": True,
                **changes.pop("pfs", {}),
            },
        ],
        **changes,
    }


def make_state(step: int) -> dict[str, Any]:
    """A state that differs from rank to rank and from step to step."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return {
        "weights": {f"w{i}": torch.randn(100 + RANK, 50, generator=generator) for i in range(4)},
        "extra": {"step": step, "rank": RANK},
        "rng": None,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def save(folder: str, steps: list[int], **changes: Any) -> Any:
    """Save these steps, and wait until the last is on every tier."""
    with tierfall.open(config(folder, **changes)) as ckpt:
        for step in steps:
            handle = ckpt.save(step, make_state(step))
            ckpt.wait_captured()
        handle.wait("nvme")
        handle.wait("pfs")
        return [[c.step, c.attempt, sorted(c.tiers)] for c in ckpt.checkpoints()]


def restore(folder: str, expect: int | None = None, **changes: Any) -> Any:
    """Restore the newest, say from where, and whether it is bit for bit what this rank saved."""
    with tierfall.open(config(folder, **changes)) as ckpt:
        state = make_state(0)
        report = ckpt.restore(state)
        if report is None:
            return None
        good = same(state, make_state(report.step))
        return {
            "step": report.step,
            "good": good,
            "tiers": sorted({s.tier for s in report.sources}),
        }


def main() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s")
    function: Callable[..., Any] = globals()[sys.argv[1]]
    try:
        answer = function(**json.loads(sys.argv[2]))
    except Exception as error:
        logging.exception("it ends")
        answer = {"error": type(error).__name__, "text": str(error)}
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
