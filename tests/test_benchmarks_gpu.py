"""The GPU part of the benchmarks on a fake device: its logic, and what it waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import figures, machine, report
from benchmarks.figures import Results
from benchmarks.gpu import bus, large, part, restores, saves, steps
from benchmarks.gpu.bench import Bench
from benchmarks.plan import Plan
from tests.core.fake_device import FakePlaces, FakeStream
from tests.tiny_plan import tiny_plan
from tierfall.core.capture.spill import DeviceSlab
from tierfall.run import saver

pytestmark = pytest.mark.benchmarks

PARAMETERS = 1_100_000
LAYERS = large.LAYERS
HOST_ROWS = {
    "longest step, memory being prepared": 1.2,
    "save() keeps the host": 2.0,
    "the step hook keeps the host": 2.0,
    "read off the device, over memcpy": 1 / 0.9,
    "captured and sealed, over memcpy": None,
    "stall of an update at once": None,
    "a save in every step, host": 1.05,
    "a save in every fifth step, host": 1.05,
    "restore, over memcpy": 1 / 0.7,
}
KILL_ROWS = {"open after a kill": 0.5, "restore after a kill, over memcpy": 1 / 0.7}
DISK_ROWS = {
    "a save in every step, host and disk": 1.05,
    "a save in every fifth step, host and disk": 1.05,
    "done: a bare write": None,
    **{
        f"{what}: {name}": None
        for name in ("tierfall", "DCP async_save", "torch.save")
        for what in ("training held", "done")
    },
}
SLAB_ROWS = {"the step hook, with a slab": 2.0, "stall with a slab, over a copy": 1.2}
TARGETS = {**HOST_ROWS, **KILL_ROWS, **DISK_ROWS, **SLAB_ROWS}


class Rehearsal:
    """An accelerator whose device is the fake one; what is asked of it is written down."""

    device = "cpu"

    def __init__(self, stream: FakeStream, free_bytes: int = 4 << 30) -> None:
        self._stream = stream
        self.free = free_bytes
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self._stream.finish()

    def mark(self) -> float:
        self.calls.append("mark")
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        self.calls.append("seconds")
        return last - first

    def free_bytes(self) -> int:
        return self.free


class SlabPlaces(FakePlaces):
    """The fake device, with the slab of whoever opens it."""

    def __call__(self, *arguments: Any) -> FakePlaces:
        self.memory = arguments[1](torch.device("cpu")) if len(arguments) > 1 else None
        return self


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, short batches, copies in several parts, no disk to wait for: no figure is judged here."""
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(large, "LAYERS", 2)
    monkeypatch.setattr(large, "CONTEXT", 8)
    monkeypatch.setattr(large.LargeWorkload, "batch", 1)
    monkeypatch.setattr(bus, "COPY_BYTES", 3 << 20)
    monkeypatch.setattr(steps, "STEPS", 6)
    monkeypatch.setattr(restores, "STARTS", 1)


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    made = FakeStream()
    yield made
    made.close()


@pytest.fixture
def rehearsal(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """A device with room for a slab, which saves use."""
    made = Rehearsal(stream)

    allocate = DeviceSlab.allocate

    def allocated(capacity_bytes: int, *arguments: Any, **words: Any) -> DeviceSlab | None:
        made.free -= capacity_bytes
        return allocate(capacity_bytes, *arguments, **words)

    monkeypatch.setattr(saver, "CaptureDevices", SlabPlaces(stream))
    monkeypatch.setattr(DeviceSlab, "allocate", allocated)
    return made


def plan(folder: Path, **words: Any) -> Plan:
    return tiny_plan(folder, "gpu", **{"rounds": 2, "parameters": PARAMETERS, **words})


def made(folder: Path, rehearsal: Rehearsal, **words: Any) -> Bench:
    return Bench(plan(folder), words.pop("say", lambda line: None), Results(), rehearsal, **words)


def rows(found: Results) -> dict[str, float | None]:
    return {each.name: each.target for each in (*found.ratios, *found.findings)}


# The part --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_figure_is_measured_with_its_target(tmp_path: Path, rehearsal: Rehearsal) -> None:
    """The processes that are killed are real, and have their state on the CPU."""
    said: list[str] = []
    one = made(tmp_path, rehearsal, say=said.append)
    part.run(one)
    found = one.results
    assert rows(found) == TARGETS
    assert "gpu_left_out" not in found.facts
    once = {name for name in found.samples if name.startswith(("gpu.one save", restores.KILLED))}
    others = found.samples.keys() - {*once, steps.series("host", "preparing")}
    counts = {name: len(found.samples[name]) for name in (*once, *others)}
    assert counts == dict.fromkeys(once, 1) | dict.fromkeys(others, 2)
    held = {name for name in once if name.endswith("/held")}
    assert all(value > 0 for name in found.samples.keys() - held for value in found.samples[name])
    for name in (saves.AT_ONCE, saves.SHELTERED):
        for whole, save, hook in zip(
            *(found.samples[key] for key in (name, f"{name}/save", f"{name}/hook")), strict=True
        ):
            assert save + hook < whole
    assert list(one.plan.folder.iterdir()) == list(one.plan.memory.iterdir()) == []
    found.facts.update(load_before=0.0, load_after=0.0)
    text = report.table(found, machine.describe(Path.cwd(), Path.cwd(), "cpu"))
    assert all(name in text for name in (*TARGETS, *found.samples))
    assert "billion parameters in fp32" in text
    assert set(lines_of(text)) == set(lines_of("\n".join(said)))
    last_of_host = max(place for place, line in enumerate(said) if starts_with(HOST_ROWS, line))
    assert last_of_host < next(place for place, line in enumerate(said) if "is killed" in line)


def starts_with(names: Iterable[str], line: str) -> bool:
    return line.startswith(tuple(f"{name:<{report.NAME_WIDTH}}" for name in names))


def lines_of(text: str) -> list[str]:
    """The lines of the table's rows."""
    return [line for line in text.splitlines() if starts_with(TARGETS, line)]


# What is left out ------------------------------------------------------------------------------------


# The state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_fingerprint_tells_one_changed_byte(place: int) -> None:
    before = torch.randint(0, 200, (10_000,), dtype=torch.uint8)
    after = before.clone()
    after[place] += 1
    same, other = (large.fingerprint([each]) for each in (before.clone(), after))
    wanted = large.fingerprint([before])
    assert all(map(torch.equal, same, wanted))
    assert not all(map(torch.equal, other, wanted))
    assert large.digest([before]) == large.digest([before.clone()]) != large.digest([after])


# The command -----------------------------------------------------------------------------------------


def test_on_the_cpu_the_part_is_left_out_and_that_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    found = Results()
    part.measure(plan(tmp_path), said.append, found)
    assert said == found.facts["gpu_left_out"]
    assert "--device cuda" in said[0]
    assert not found.samples
    assert figures.exit_code(found, report_only=False) == figures.MET
