"""What one rank of a job with peer memory does: functions by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tierfall
from tests.distributed.program import NODE, RANK, main, make_state, same


def config(folder: str, **changes: Any) -> dict[str, Any]:
    root = Path(folder)
    return {
        "run": "many",
        "max_wait": "10s",
        "chunk": "64KiB",
        "interval": {"at_end": False, "every": 1},
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / f"memory-{NODE}")},
            {
                "name": "peers",
                "kind": "peer",
                "path": str(root / f"peers-{NODE}"),
                "retain": {"last": 1},
            },
            {
                "name": "pfs",
                "kind": "file",
                "path": str(root / "pfs"),
                "shared": True,
                "flush": {"every": 100},
            },
        ],
        **changes,
    }


def train(folder: str, steps: list[int], **changes: Any) -> None:
    """Go on from where the run is, and save these steps to peer memory; then wait to be killed."""
    with tierfall.open(config(folder, **changes)) as ckpt:
        ckpt.restore(make_state(0))
        for step in steps:
            handle = ckpt.save(step, make_state(step))
            ckpt.wait_captured()
            handle.wait("peers", 30)
        Path(folder, f"ready-{RANK}").touch()
        time.sleep(600)


def resume(folder: str, **changes: Any) -> dict[str, Any] | None:
    """Restore, and return the step, whether it is bit for bit what this rank saved, and the bytes read by tier."""
    dist.init_process_group("gloo")
    with tierfall.open(config(folder, **changes)) as ckpt:
        state = make_state(0)
        report = ckpt.restore(state)
        if report is None:
            return None
        return {
            "step": report.step,
            "good": same(state, make_state(report.step)),
            "tiers": {source.tier: source.bytes for source in report.sources},
        }


if __name__ == "__main__":
    main(globals())
