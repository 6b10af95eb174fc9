"""What a capture must not do to a training on a real GPU: its memory, its streams, its graphs, its host's time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.capture.lazy_help import (
    PATIENCE_S,
    Held,
    MakeConfig,
    Trainer,
    assert_same,
    saved,
    warmed_up,
)
from tests.steps import wait_until
from tierfall.core.capture.copier import EAGER_BYTES_MAX
from tierfall.core.runtime import memory_copies
from tierfall.core.runtime.driver import driver_call
from tierfall.core.types.values import SaveOutcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20
SECOND = 1_500_000_000
"""Cycles of a GPU that take about a second."""


class OnGpu(Trainer):
    """A model of about 50 MiB with its moments."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(64, 1024, device="cuda")).pow(2).mean().backward()

    def host_values(self) -> dict[str, torch.Tensor]:
        return {name: value.cpu() for name, value in self.now().items()}


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    return make_config(chunk="4MiB", host={"capacity": "1GiB"}, disk={"retain": {"last": 3}})


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# Memory of the device --------------------------------------------------------------------------------


def test_copies_on_the_device_are_bounded_and_freed_without_a_step(config: dict[str, Any]) -> None:
    """As beside a moving average, which may change at any time."""
    trainer = OnGpu()
    average = {str(n): torch.randn(12 * MIB, device="cuda") for n in range(8)}
    config["tiers"][0]["capacity"] = "2GiB"
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        ckpt.save(2, {**trainer.state, "average": average}).captured()
        trainer.step()
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        handle = ckpt.save(3, {**trainer.state, "average": average})
        assert torch.cuda.max_memory_allocated() - before <= EAGER_BYTES_MAX + 8 * MIB
        handle.captured()
        wait_until(lambda: allocated() <= before + MIB, "the copies are freed")


def test_a_model_that_leaves_the_gpu_frees_its_memory_once_it_is_read(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer = OnGpu()
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        expected, before = trainer.host_values(), allocated()
        handle = ckpt.save(2, trainer.state)
        trainer.model.cpu()
        for moments in trainer.optimizer.state.values():
            for moment in moments.values():
                moment.data = moment.data.cpu()
        wait_until(lambda: allocated() < before - 40 * MIB, "its memory is free")
        handle.wait()
        assert_same(saved(tmp_path / "disk", 2), expected)


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_memory_that_was_replaced_is_read_before_it_is_freed(
    config: dict[str, Any], tmp_path: Path, segments: str
) -> None:
    torch.cuda.memory._set_allocator_settings(segments)
    try:
        trainer = OnGpu()
        with tierfall.open(config) as ckpt:
            warmed_up(ckpt, trainer)
            for step in range(2, 12):
                trainer.step()
                expected = trainer.host_values()
                handle = ckpt.save(step, trainer.state)
                for moments in trainer.optimizer.state.values():
                    for moment in moments.values():
                        moment.data = moment.data.cpu()
                torch.cuda.empty_cache()
                junk = torch.full((16 * MIB,), 7.0, device="cuda")
                handle.wait()
                assert handle.outcome is SaveOutcome.SAVED
                assert_same(saved(tmp_path / "disk", step), expected)
                for moments in trainer.optimizer.state.values():
                    for name, moment in moments.items():
                        moment.data = moment.data.to("cpu" if name == "step" else "cuda")
                del junk
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_memory_that_is_freed_in_place_is_not_taken_by_a_stream_that_waits_for_nothing(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer, side = OnGpu(), torch.cuda.Stream()
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        with torch.cuda.stream(side):
            extra = torch.full((32 * MIB,), 3.0, device="cuda")
        side.synchronize()
        state = {**trainer.state, "extra": tierfall.item(extra, changes="on_step")}
        ckpt.save(2, state).captured()
        trainer.step()
        handle = ckpt.save(3, state)
        extra.untyped_storage().resize_(0)
        with torch.cuda.stream(side):
            other = torch.full((32 * MIB,), 9.0, device="cuda")
        handle.wait()
        assert bool((tierfall.load(tmp_path / "disk", step=3)["extra"] == 3.0).all())
        del other


class Channels(torch.nn.Module):
    """Weights that are not contiguous, of more than one piece of host memory that is locked at once."""

    def __init__(self) -> None:
        super().__init__()
        convolution = torch.nn.Conv2d(1024, 2048, 3).to(memory_format=torch.channels_last)
        self.layers = torch.nn.ModuleList([convolution])


def test_tensors_that_torch_copies_go_to_memory_that_is_locked_piece_by_piece(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """A copy to memory that two calls have locked, or none in part, is refused by the driver."""
    model = Channels().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {"weight": torch.randn(80 * MIB, device="cuda")}
    state = {"model": model, "optimizer": optimizer, "average": average}
    config["tiers"][0]["capacity"] = "2GiB"
    with tierfall.open(config) as ckpt:
        for step in range(1, 6):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            expected = model.layers[0].weight.detach().cpu()
            ckpt.save(step, state).wait()
            loaded = tierfall.load(tmp_path / "disk", step=step)
            assert torch.equal(loaded["model"]["layers.0.weight"], expected)
            assert torch.equal(loaded["average"]["weight"], average["weight"].cpu())


# Streams and graphs ----------------------------------------------------------------------------------


def test_graphs_may_be_recorded_while_a_state_is_captured(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer = OnGpu()
    x, w = torch.randn(64, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda")
    x @ w
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 8):
            trainer.step()
            expected = trainer.host_values()
            handle = ckpt.save(step, trainer.state)
            for _ in range(10):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = x @ w
                    time.sleep(0.002)
            handle.wait()
            assert_same(saved(tmp_path / "disk", step), expected)
            del y


@pytest.mark.parametrize("mode", ["lazy", "blocking"])
def test_a_state_that_was_written_on_a_stream_which_nobody_joined_is_captured_whole(
    config: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    trainer, side = OnGpu(), torch.cuda.Stream()
    with tierfall.open({**config, "capture": {"mode": mode}}) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 8):
            trainer.backward()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(SECOND // 10)
                trainer.optimizer.step()
            handle = ckpt.save(step, trainer.state)
            side.synchronize()
            expected = trainer.host_values()
            handle.wait()
            assert_same(saved(tmp_path / "disk", step), expected)
            trainer.optimizer.zero_grad()


def test_a_second_optimizer_waits_while_spare_memory_is_filled(
    config: dict[str, Any], tmp_path: Path, held: Held
) -> None:
    config["tiers"].insert(0, {"name": "spare", "kind": "device", "capacity": "256MiB"})
    trainer, side = OnGpu(), torch.cuda.Stream()
    first, second = trainer.model[:2], trainer.model[2:]
    optimizers = [torch.optim.AdamW(half.parameters(), lr=0.1) for half in (first, second)]
    state = {"model": trainer.model, "a": optimizers[0], "b": optimizers[1]}
    held.free.set()
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            trainer.backward()
            for optimizer in optimizers:
                optimizer.step()
            if step < 3:
                ckpt.save(step, state).wait()
        trainer.backward()
        torch.cuda.synchronize()
        expected = {k: v.cpu() for k, v in trainer.model.state_dict().items()}
        held.hold()
        handle = ckpt.save(3, state)
        assert handle.stats.lazy
        torch.cuda._sleep(SECOND)
        optimizers[0].step()
        with torch.cuda.stream(side):
            optimizers[1].step()
        held.free.set()
        handle.wait()
        loaded = tierfall.load(tmp_path / "disk", step=3)["model"]
        assert_same({**loaded}, expected)


def test_state_in_host_memory_takes_nothing_of_the_gpu(tmp_path: Path) -> None:
    program = f"""
        import torch, tierfall
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        tiers = [
            dict(name="spare", kind="device", capacity="64MiB"),
            dict(name="host", kind="host", capacity="256MiB", folder="{tmp_path}/memory"),
            dict(name="disk", kind="file", path="{tmp_path}/disk"),
        ]
        with tierfall.open(dict(run="cpu", tiers=tiers)) as ckpt:
            for step in (1, 2, 3):
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                ckpt.save(step, dict(model=model, optimizer=optimizer)).wait()
        assert not torch.cuda.is_initialized()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "goes on without tier spare: the state is not on a CUDA device" in ran.stderr


# Time of the host ------------------------------------------------------------------------------------


def test_a_number_on_the_gpu_does_not_hold_up_the_seal(config: dict[str, Any]) -> None:
    trainer = OnGpu()
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        handle = ckpt.save(2, trainer.state, metrics={"loss": torch.ones((), device="cuda")})
        trainer.step()
        torch.cuda._sleep(3 * SECOND)
        handle.captured(timeout=1.0)
        torch.cuda.synchronize()


def test_a_save_does_not_wait_for_the_scale_of_a_scaler(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer, scaler = OnGpu(fused=True), torch.amp.GradScaler("cuda", init_scale=4.0)
    state = {**trainer.state, "scaler": scaler}
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            loss = trainer.model(torch.randn(64, 1024, device="cuda")).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            if step == 3:
                torch.cuda._sleep(SECOND)
            began = time.monotonic()
            handle = ckpt.save(step, state)
            took = time.monotonic() - began
            handle.wait()
        assert took < 0.5
        other = torch.amp.GradScaler("cuda")
        ckpt.restore({"scaler": other}, only=["scaler"])
    assert other.state_dict() == scaler.state_dict()


def launches(action: Callable[[], Any]) -> int:
    """How many kernels an action runs on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    on_device = [each for each in profile.events() if each.device_type.name == "CUDA"]
    return len([e for e in on_device if not e.name.startswith(("Memcpy", "Memset"))])


def test_a_save_of_many_small_tensors_takes_few_launches(config: dict[str, Any]) -> None:
    """Of fused AdamW, whose ``step`` is a tensor for each parameter, and of buffers."""
    layers = [
        torch.nn.Sequential(torch.nn.Linear(31, 31), torch.nn.BatchNorm1d(31)) for _ in range(60)
    ]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            model(torch.randn(8, 31, device="cuda")).pow(2).mean().backward()
            optimizer.step()
            ckpt.save(step, state).wait()
        optimizer.step()
        torch.cuda.synchronize()
        assert 1 <= launches(lambda: ckpt.save(4, state).captured()) <= 20


def test_a_driver_without_batches_captures_the_same(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory_copies,
        "driver_call",
        lambda name: None if name == "cuMemcpyBatchAsync" else driver_call(name),
    )
    trainer = OnGpu()
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        for step in (2, 3):
            trainer.step()
            expected = trainer.host_values()
            ckpt.save(step, trainer.state).wait(timeout=PATIENCE_S)
            assert_same(saved(tmp_path / "disk", step), expected)
