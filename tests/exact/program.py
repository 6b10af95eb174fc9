"""The process that trains all scenarios: ``program.py WHAT FOLDER MEMORY``; prints a digest of each as JSON.

``straight`` trains without a break; ``killed`` saves and kills itself in the middle of the training; ``resumed``
restores and goes on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from tests.exact.scenarios import Scenario, build, digest

SAVED_AT = 8
STEPS = 13


def train(scenarios: dict[str, Scenario], first: int, end: int) -> None:
    for number in range(first, end):
        for scenario in scenarios.values():
            scenario.step(number)


def state_of(scenarios: dict[str, Scenario]) -> dict[str, Any]:
    return {name: each.state for name, each in scenarios.items()}


def config(folder: Path, memory: Path) -> dict[str, Any]:
    return {
        "run": "exact",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(memory), "capacity": "64MiB"},
            {"name": "disk", "kind": "file", "path": str(folder / "tier")},
        ],
    }


def tell(scenarios: dict[str, Scenario]) -> None:
    print(json.dumps({name: digest(each) for name, each in scenarios.items()}))


def straight() -> None:
    scenarios = build(0)
    train(scenarios, 0, STEPS)
    tell(scenarios)


def killed(folder: Path, memory: Path) -> None:
    scenarios = build(0)
    ckpt = tierfall.open(config(folder, memory))
    for number in range(STEPS):
        train(scenarios, number, number + 1)
        done = number + 1
        if done in (SAVED_AT - 2, SAVED_AT):
            handle = ckpt.save(done, state_of(scenarios))
    assert handle.stats.lazy
    handle.captured(60)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder: Path, memory: Path) -> None:
    scenarios = build(1)
    random.seed(5)
    with tierfall.open(config(folder, memory)) as ckpt:
        report = ckpt.restore(state_of(scenarios))
        assert report is not None
        assert report.step == SAVED_AT, report
        train(scenarios, SAVED_AT, STEPS)
    tell(scenarios)


def main() -> None:
    what, folder, memory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    if what == "straight":
        straight()
    elif what == "killed":
        killed(folder, memory)
    else:
        resumed(folder, memory)


if __name__ == "__main__":
    main()
