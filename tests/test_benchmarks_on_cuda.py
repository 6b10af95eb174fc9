"""The other parts of the benchmarks with ``--device cuda``: their states are on the device, and timing waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import apart, bare, memory, objects, rounds, small, suite, training
from benchmarks.figures import Results
from benchmarks.peers import alone
from benchmarks.peers import measure as peers
from benchmarks.peers import memory as peer_memory
from benchmarks.plan import Plan
from tests.tiny_plan import tiny_plan
from tierfall.core.runtime.pinned import PageLock

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


def test_memory_of_a_peer_is_measured_on_the_device_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "Workload", make)
    run_here(monkeypatch)
    wanted = plan(tmp_path)
    with pytest.raises(Made, match="meta"):
        peers.measure_apart(wanted, peer_memory, "torch", direct=False)


def test_what_is_timed_begins_and_ends_when_the_device_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    for module in (training, alone, bare, rounds):
        monkeypatch.setattr(module, "synchronize", call("idle"))
    monkeypatch.setattr(training, "STEPS", 1)
    work: Any = SimpleNamespace(backward=call("backward"), update=call("update"))
    training.train(work)
    alone._idle_after(call("load"))()
    bare.copy_all([], [])
    rounds.quiet()
    assert calls == ["backward", "update", "idle", "load", *["idle"] * 3]


# Page-locked references ------------------------------------------------------------------------------


def on_gpu(count: int) -> Any:
    """What a buffer asks of a tensor on a GPU."""
    return SimpleNamespace(
        nbytes=4 * count, dtype=torch.float32, shape=torch.Size([count]), is_cuda=True
    )


def test_buffer_that_cannot_be_locked_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PageLock(address=0, length_bytes=0, locked=False, reason="the driver's words")
    monkeypatch.setattr(bare, "lock_pages", lambda address, length: refused)
    with pytest.raises(RuntimeError, match="cannot be page-locked: the driver's words"):
        bare.Buffer([on_gpu(1000)], touched=True)
    bare.Buffer([on_gpu(1000)], touched=False)  # a fresh start's: not locked


def test_buffer_is_unlocked_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []

    class Lock:
        locked = True

        def __init__(self, address: int, length: int) -> None:
            self._view: Any = torch.empty(0)
            events.append(("locked", address))
            self.address = address

        def release(self) -> None:
            mapped = Path("/proc/self/maps").read_text().splitlines()
            ranges = [line.split()[0].split("-") for line in mapped]
            there = any(int(a, 16) <= self.address < int(b, 16) for a, b in ranges)
            events.append(("unlocked while mapped" if there else "too late", self.address))

    monkeypatch.setattr(bare, "lock_pages", Lock)
    buffer = bare.Buffer([on_gpu(1 << 20)], touched=True)
    assert [name for name, _ in events] == ["locked"]
    del buffer
    assert [name for name, _ in events] == ["locked", "unlocked while mapped"]
