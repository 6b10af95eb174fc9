"""The GPU part of the benchmarks on a fake device: its logic, and what it waits for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import bare, figures, gpu, hooks, large, machine, report
from benchmarks.__main__ import parse
from benchmarks.figures import Results
from benchmarks.plan import Plan
from tests.core.fake_device import FakePlaces, FakeStream
from tests.tiny_plan import tiny_plan
from tierfall.config import Config
from tierfall.core.capture.spill import Slab
from tierfall.core.sampling.image_check import ImageCheck
from tierfall.core.types.errors import CapacityError
from tierfall.run import saver
from tierfall.tiers.device import DeviceSlab

PARAMETERS = 1_100_000
LAYERS = large.LAYERS
TARGETS = {
    "save() keeps the host": 2.0,
    "the step hook keeps the host": 2.0,
    "read off the device, over memcpy": 1 / 0.9,
    "captured and sealed, over memcpy": None,
    "stall of an update at once": None,
    "a step with a save takes longer by": 1.0,
    "the step hook, with a slab": 2.0,
    "stall with a slab, over a copy": 1.2,
}


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
        self.memory = arguments[1] if len(arguments) > 1 else None
        return self


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, short batches, copies in several parts, no disk to wait for: no figure is judged here."""
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(large, "LAYERS", 2)
    monkeypatch.setattr(large, "CONTEXT", 8)
    monkeypatch.setattr(large.LargeWorkload, "batch", 1)
    monkeypatch.setattr(gpu, "COPY_BYTES", 3 << 20)
    monkeypatch.setattr(gpu, "PAIRS_A_ROUND", 1)


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    made = FakeStream()
    yield made
    made.close()


@pytest.fixture
def rehearsal(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """A device with room for a slab, which saves use."""
    made = Rehearsal(stream)

    def open_slab(config: Config) -> Slab | None:
        if config.device is None:
            return None
        made.free -= config.device.capacity_bytes
        return DeviceSlab.allocate(
            config.device.capacity_bytes, torch.device("cpu"), name=config.device.name
        )

    monkeypatch.setattr(saver, "CaptureDevices", SlabPlaces(stream))
    monkeypatch.setattr(saver, "_open_slab", open_slab)
    return made


def plan(folder: Path, **words: Any) -> Plan:
    return tiny_plan(folder, "gpu", rounds=2, parameters=PARAMETERS, **words)


def rehearse(folder: Path, rehearsal: Rehearsal) -> Results:
    found = Results()
    gpu.Gpu(plan(folder), lambda line: None, found, rehearsal).run()
    return found


# The part --------------------------------------------------------------------------------------------


def test_every_figure_is_measured_with_its_target(tmp_path: Path, rehearsal: Rehearsal) -> None:
    found = rehearse(tmp_path, rehearsal)
    messages = {each.name: each.target for each in (*found.ratios, *found.findings)}
    assert messages == TARGETS
    assert {len(values) for values in found.samples.values()} == {2}
    assert all(value > 0 for values in found.samples.values() for value in values)
    for name in (gpu.AT_ONCE, gpu.SHELTERED):
        for whole, save, hook in zip(
            *(found.samples[key] for key in (name, f"{name}/save", f"{name}/hook")), strict=True
        ):
            assert save + hook < whole
    found.facts.update(load_before=0.0, load_after=0.0)
    text = report.table(found, machine.describe(Path.cwd(), Path.cwd(), "cpu"))
    assert all(name in text for name in (*TARGETS, *found.samples))
    assert "billion parameters in bf16" in text


def test_between_save_and_update_nothing_waits_for_the_device(
    tmp_path: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time on the host with a synchronization inside would be the device's."""
    part = gpu.Gpu(plan(tmp_path), lambda line: None, Results(), rehearsal)
    with part._opened("plain") as (ckpt, clock):
        work, calls = part._work, rehearsal.calls
        contender = part._at_once("race", ckpt, clock)
        contender.before()
        save, backward, update = ckpt.save, work.backward, work.update
        monkeypatch.setattr(work, "backward", lambda: (calls.append("backward"), backward()))
        monkeypatch.setattr(work, "update", lambda: (calls.append("update"), update()))
        monkeypatch.setattr(ckpt, "save", lambda *words: (calls.append("save"), save(*words))[1])
        calls.clear()
        contender.timed()
        contender.after()
    assert calls == ["backward", "save", "update", "mark", "mark", "synchronize", "seconds"]


def test_without_room_for_a_slab_its_figures_are_left_out_and_that_is_reported(
    tmp_path: Path, rehearsal: Rehearsal
) -> None:
    rehearsal.free = 1 << 20
    found = rehearse(tmp_path, rehearsal)
    messages = {each.name for each in (*found.ratios, *found.findings)}
    assert messages == {name for name in TARGETS if "slab" not in name}
    (line,) = found.facts["gpu_left_out"]
    assert "left out: the device tier" in line
    found.facts.update(load_before=0.0, load_after=0.0)
    assert line in report.table(found, machine.describe(Path.cwd(), Path.cwd(), "cpu"))


def test_slab_that_was_not_taken_is_not_measured(
    tmp_path: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_open_slab", lambda config: None)
    with pytest.raises(AssertionError, match="the device tier was not taken"):
        rehearse(tmp_path, rehearsal)


def test_image_with_later_values_is_found_out(
    tmp_path: Path, rehearsal: Rehearsal, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device does not hold the update, as if the barrier were none, and nobody else looks at the image."""
    monkeypatch.setattr(ImageCheck, "changed_in", lambda self, data: [])
    part = gpu.Gpu(plan(tmp_path), lambda line: None, Results(), rehearsal)
    with part._opened("plain") as (ckpt, _):
        part._check(ckpt)
        update = part._work.update
        stream.blocks = False

        def early() -> None:
            update()
            stream.free.set()

        part._settle()
        stream.free.clear()
        monkeypatch.setattr(part, "_settle", lambda: None)
        monkeypatch.setattr(part._work, "update", early)
        with pytest.raises(AssertionError, match="not what was saved"):
            part._check(ckpt)


def test_save_that_captured_blocking_is_not_measured(tmp_path: Path, rehearsal: Rehearsal) -> None:
    part = gpu.Gpu(plan(tmp_path), lambda line: None, Results(), rehearsal)
    blocking = pytest.raises(AssertionError, match="captured blocking")
    with part._opened("plain") as (ckpt, _), blocking:
        part._save(ckpt)  # no update since the last


def test_save_that_found_no_room_is_reported_as_it_was(
    tmp_path: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = gpu.Gpu(plan(tmp_path), lambda line: None, Results(), rehearsal)
    with part._opened("plain") as (ckpt, _):
        skipped = SimpleNamespace(exception=lambda: CapacityError("host memory is full"))
        monkeypatch.setattr(ckpt, "save", lambda *words: skipped)
        with pytest.raises(CapacityError, match="host memory is full"):
            part._save(ckpt)


def test_the_reference_holds_what_it_copies_into(
    tmp_path: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is let go of is locked no more, though tensors of its memory live on."""
    gone: list[bool] = []

    class Watched(bare.Buffer):
        def __del__(self) -> None:
            gone.append(True)

    monkeypatch.setattr(gpu, "Buffer", Watched)
    part = gpu.Gpu(plan(tmp_path), lambda line: None, Results(), rehearsal)
    assert not gone
    del part
    assert gone


def test_hook_clock_times_what_is_registered_inside_and_nothing_else(
    stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def takes(seconds: float) -> Callable[..., None]:
        def hook(*words: Any) -> None:
            nonlocal now
            now += seconds

        return hook

    class Watched(Rehearsal):
        def mark(self) -> float:
            return now

    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: now))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = large.MixedAdamW([parameter], lr=0.1)
    before = register_optimizer_step_pre_hook(takes(1.0))
    clock = hooks.HookClock(Watched(stream))
    inside = register_optimizer_step_pre_hook(takes(4.0))
    clock.end_here()
    behind = register_optimizer_step_pre_hook(takes(16.0))
    optimizer.step()
    for handle in (before, inside, behind):
        handle.remove()
    assert (now, clock.host_s, clock.device_s()) == (21.0, 4.0, 4.0)
    clock.close()
    optimizer.step()
    assert clock.host_s == 4.0


def test_added_time_is_a_share_of_one_step_of_the_two() -> None:
    assert gpu.added_percent(2.02, 2.0) == pytest.approx(2.0)
    assert gpu.added_percent(1.0, 1.0) == 0


def test_batches_outlast_the_copy_by_a_quarter() -> None:
    assert gpu.batches_for(1.0, 0.5) == 3
    assert gpu.batches_for(1.0, 100.0) == 1


# The state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [10**9, 3 * 10**9, 7 * 10**9])
def test_large_model_has_its_parameters_and_about_1000_tensors(
    parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "LAYERS", LAYERS)
    monkeypatch.setattr(large, "CONTEXT", 1024)
    shape = large.shape_of(parameters)
    assert shape.parameters == pytest.approx(parameters, rel=0.001)
    with torch.device("meta"):
        model = large.Gpt(shape)
    counts = [parameter.numel() for parameter in model.parameters()]
    assert sum(counts) == shape.parameters
    assert 4 * len(counts) == 976


def test_large_state_takes_10_bytes_a_parameter() -> None:
    work = large.LargeWorkload(large.shape_of(PARAMETERS))
    work.train(1)
    tensors = work.tensors()
    steps = [tensor for tensor in tensors if tensor.dim() == 0]
    assert sum(t.nbytes for t in tensors) == 10 * work.shape.parameters + 4 * len(steps)
    assert {p.dtype for p in work.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for s in work.optimizer.state.values() for t in s.values()} == {torch.float32}


def test_mixed_adamw_steps_as_torchs_does() -> None:
    torch.manual_seed(0)
    start, options = torch.randn(50), {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [large.MixedAdamW([mine], **options), torch.optim.AdamW([theirs], **options)]  # type: ignore[arg-type]
    for _ in range(5):
        gradient = torch.randn(50)
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.allclose(mine, theirs, atol=1e-6)
    with pytest.raises(TypeError, match="no closure"):
        optimizers[0].step(lambda: 0.0)


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_fingerprint_tells_one_changed_byte(place: int) -> None:
    before = torch.randint(0, 200, (10_000,), dtype=torch.uint8)
    after = before.clone()
    after[place] += 1
    same, other = (large.fingerprint([each]) for each in (before.clone(), after))
    wanted = large.fingerprint([before])
    assert all(map(torch.equal, same, wanted))
    assert not all(map(torch.equal, other, wanted))


# The command -----------------------------------------------------------------------------------------


def test_on_the_cpu_the_part_is_left_out_and_that_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    found = Results()
    gpu.measure(plan(tmp_path), said.append, found)
    assert said == found.facts["gpu_left_out"]
    assert "--device cuda" in said[0]
    assert not found.samples
    assert figures.exit_code(found, report_only=False) == figures.MET


def test_cuda_without_a_device_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--device", "cuda"])
    assert "no CUDA device here" in capsys.readouterr().err


def test_parameters_may_be_written_shortly(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--parameters", "7e9"]).parameters == 7_000_000_000
    for wrong in ("0", "-1e9", "inf", "nan", "many"):
        with pytest.raises(SystemExit):
            parse([f"--parameters={wrong}"])
        assert "not a number above zero" in capsys.readouterr().err
