"""The other parts of the benchmarks with ``--device cuda``: their states are on the device, and timing waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import apart, memory, objects, small, suite, training
from benchmarks.figures import Results
from benchmarks.peers import alone
from benchmarks.plan import Plan
from tests.tiny_plan import tiny_plan

pytestmark = pytest.mark.benchmarks


class Made(Exception):
    """Where a part makes its state; nothing is measured."""


def make(shape: Any, *, device: str = "cpu") -> None:
    raise Made(device)


def make_buffer(tensors: list[torch.Tensor], **more: Any) -> None:
    raise Made(tensors[0].device)


def plan(folder: Path, only: str = "") -> Plan:
    """For a device that every torch has, and that holds no bytes."""
    return tiny_plan(folder, only, device="meta")


def say(line: str) -> None:
    """Nobody listens."""


def run_here(patch: pytest.MonkeyPatch) -> None:
    """What runs in a process of its own runs in this one."""

    def run(module: str, words: list[str], **more: Any) -> None:
        patch.setattr(sys, "argv", [module, *words])
        sys.modules[module].main()

    patch.setattr(apart, "run", run)


PARTS: dict[str, Callable[[Plan], object]] = {
    "durable": lambda plan: suite.Suite(plan, say),
    "memory": memory.measure,
    "objects": lambda plan: objects.measure(plan, say, Results()),
    "throttled": lambda plan: objects.measure(plan, say, Results()),
    "peers": lambda plan: alone.measure(plan, "torch", direct=False),
    "training": lambda plan: training.measure(plan, say, Results()),
    "small": lambda plan: small.measure(plan, say, Results()),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_makes_its_state_on_the_device_that_is_asked_for(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (suite, objects, training, alone, memory):
        monkeypatch.setattr(module, "Workload", make)
    run_here(monkeypatch)
    monkeypatch.setattr(small.bare, "Buffer", make_buffer)
    monkeypatch.setattr(objects, "running", lambda folder, bucket: nullcontext())
    wanted = plan(tmp_path, part)
    with pytest.raises(Made, match="meta"):
        PARTS[part](wanted)
