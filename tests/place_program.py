"""What a trainer on one node does in the tests of real places: each function gets its tiers, and returns a value."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import tierfall

MIB = 1 << 20
_KINDS = (torch.float32, torch.bfloat16, torch.uint8)


def state_of(step: int, rank: int = 0, *, mib: int = 12) -> dict[str, Any]:
    """Noise, in tensors of several dtypes: any bits, which no codec makes smaller."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    noise = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=generator)
    thirds = noise.view(len(_KINDS), -1)
    return {
        "tensors": {
            str(kind): third.view(kind) for kind, third in zip(_KINDS, thirds, strict=True)
        },
        "extra": {"step": step, "rank": rank},
        "rng": None,
    }


def is_state(state: dict[str, Any], step: int, rank: int = 0) -> bool:
    """Whether each bit is what was saved."""
    saved = state_of(step, rank)
    found, wanted = state["tensors"], saved["tensors"]
    return state["extra"] == saved["extra"] and all(
        found[name].dtype == tensor.dtype
        and torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in wanted.items()
    )


def sent_bytes(ckpt: tierfall.Checkpointer) -> int:
    """What has been read for the tier ``place``."""
    edges = ckpt.statistics().edge_bytes.items()
    return sum(count for edge, count in edges if edge.endswith("->place"))


def wait_for_bytes(ckpt: tierfall.Checkpointer, count: int) -> None:
    while sent_bytes(ckpt) < count:
        time.sleep(0.01)


def doomed(folder: str, config: dict[str, Any]) -> None:
    """Save step 1, begin to flush step 2, and wait to be killed."""
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2)).captured()
        wait_for_bytes(ckpt, sent_bytes(ckpt) + 2 * MIB)
        Path(folder, "ready-0").touch()
        time.sleep(600)


def go_on(folder: str, config: dict[str, Any], step: int) -> Any:
    """Restore what there is, and save a step: the step that was found, and whether it is what this rank saved."""
    rank = int(os.environ["RANK"])
    with tierfall.open(config) as ckpt:
        state = state_of(0, rank)
        report = ckpt.restore(state)
        ckpt.save(step, state_of(step, rank), block=True)
        return report and [report.step, is_state(state, report.step, rank)]


if __name__ == "__main__":
    from tests.distributed import program  # it is a rank of a job

    program.main(globals())
