"""Lazy capture off a device: the host waits for nothing, the device's own order guards the state; on a fake device."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
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
    lazy_save,
    saved,
    warmed_up,
)
from tests.core.fake_device import FakePlaces, FakeStream, OnDevice
from tests.steps import wait_until
from tierfall.core.capture import barrier, capturer, copier, device_copies, spill
from tierfall.core.capture import device_copies as module_places
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.image.segments import HOST
from tierfall.core.runtime import streams
from tierfall.core.runtime.memory_copies import MemoryCopies
from tierfall.core.tensors.tensors import storage_uses
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.values import SaveOutcome
from tierfall.run import saver
from tierfall.tiers.device import DeviceSlab

pytestmark = pytest.mark.usefixtures("small_segments")

OPTIMIZERS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SLAB_BYTES = 1 << 20


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    made = FakeStream()
    yield made
    made.close()


@pytest.fixture
def places(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> FakePlaces:
    """Every state lies on the fake device."""
    made = FakePlaces(stream)
    monkeypatch.setattr(saver, "CaptureDevices", made)
    return made


@pytest.fixture
def slab(places: FakePlaces) -> DeviceSlab:
    places.memory = DeviceSlab(torch.zeros(SLAB_BYTES, dtype=torch.uint8))
    return places.memory


def bytes_of_state(trainer: Trainer) -> int:
    return sum(tensor.nbytes for tensor in trainer.now().values())


# Without a slab --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [True, False], ids=["by address", "by tensor"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_values_before_the_step_are_captured(
    kind: str, batches: bool, make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    places.stream.batches = batches
    trainer = Trainer(**OPTIMIZERS[kind])
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        wanted = {}
        for step in range(2, 12):
            wanted[step] = trainer.now()
            lazy_save(ckpt, trainer, step)
            trainer.step()
        ckpt.drain()
    for step, before in wanted.items():
        assert_same(saved(tmp_path / "disk", step), before)


def test_save_and_hook_return_while_the_device_has_copied_nothing(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    """The update is what must wait, and on a device it does so by itself: here it is left out."""
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        held = stream.holds
        ckpt._capturer._at_barrier()
        assert stream.holds == held + 1
        assert not any(mark.is_done() for mark in stream.enqueued[-1:])
        assert ckpt._capturer._current.past_barrier  # type: ignore[union-attr]
        assert not handle.done("host")
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_the_update_waits_for_what_was_launched(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        before, holds = trainer.now(), stream.holds
        handle = lazy_save(ckpt, trainer, 2)
        trainer.backward()
        step = threading.Thread(target=trainer.optimizer.step)
        step.start()
        wait_until(lambda: stream.holds > holds, "the hook has come so far")
        assert step.is_alive()
        assert_same(trainer.now(), before)
        stream.free.set()
        step.join(PATIENCE_S)
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_so_many_bytes_are_under_way_and_no_bound_holds_at_the_barrier(
    make_config: MakeConfig, places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "FLYING_BYTES_MAX", 10_000)  # segments are of 4 KiB at most
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        before = len(stream.enqueued)
        stream.free.clear()
        stream.blocks = False
        handle = lazy_save(ckpt, trainer, 2)
        wait_until(
            lambda: any(mark.awaited.is_set() for mark in stream.enqueued[before:]),
            "it has launched what it may, and waits",
        )
        assert 3 <= len(stream.enqueued) - before <= 5
        ckpt._capturer._at_barrier()
        assert len(stream.enqueued) - before > 8
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.register_buffer("mean", torch.arange(16.0))
        self.register_buffer("turned", torch.arange(32.0).view(4, 8).t())
        self.register_buffer("flags", torch.arange(16) % 3 == 0)


@pytest.mark.parametrize("no_room", [False, True])
def test_what_changes_at_any_time_is_fixed_when_save_returns(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, no_room: bool
) -> None:
    stream, model = places.stream, Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state, block=True)
        model.layer(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        stream.no_room = no_room
        if not no_room:
            stream.free.clear()
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.mean.add_(1)
        model.turned.add_(1)
        model.flags.logical_not_()
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)["model"]
    for name, buffer in wanted.items():
        assert torch.equal(loaded[name], buffer), name


def test_copies_on_the_device_are_bounded_and_freed_once_they_are_read(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take memory of the next forward pass; what does not fit is copied to host memory meanwhile."""
    sizes, blocks = list[int](), list[spill.TemporaryBlock]()

    class Recorded(spill.TemporaryBlock):
        def __init__(self, size_bytes: int, device: torch.device) -> None:
            super().__init__(size_bytes, device)
            sizes.append(size_bytes)
            blocks.append(self)

    monkeypatch.setattr(spill, "TemporaryBlock", Recorded)
    monkeypatch.setattr(copier, "EAGER_BYTES_MAX", 10_000)
    trainer = Trainer()
    average = {str(n): torch.full((1000,), float(n)) for n in range(5)}
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        sizes.clear()
        blocks.clear()
        handle = ckpt.save(2, {**trainer.state, "average": average})
        assert handle.stats.lazy
        for value in average.values():
            value.fill_(9.0)
        handle.captured(PATIENCE_S)
        assert 4000 < sum(sizes) <= 10_000
        assert all(block._memory is None for block in blocks), "without a step"
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)["average"]
    assert all(bool((loaded[str(n)] == n).all()) for n in range(5))


def test_memory_that_is_freed_in_place_is_read_before(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    """The host waits: another stream may take freed memory, which waits for no copy."""
    stream, trainer = places.stream, Trainer()
    extra = torch.full((1000,), 3.0)
    state = {**trainer.state, "extra": tierfall.item(extra, changes="on_step")}
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        handle = ckpt.save(2, state)
        threading.Timer(0.2, stream.free.set).start()
        extra.untyped_storage().resize_(0)
        assert stream.free.is_set()
        handle.wait(timeout=PATIENCE_S)
    assert bool((tierfall.load(tmp_path / "disk", step=2)["extra"] == 3.0).all())


def test_a_blocking_capture_and_wait_captured_return_when_all_is_read(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        stream.free.clear()
        threading.Timer(0.2, stream.free.set).start()
        first = ckpt.save(1, trainer.state)
        assert not first.stats.lazy
        assert stream.free.is_set(), "it waited"
        assert all(mark.is_done() for mark in stream.enqueued)
        trainer.step()
        stream.free.clear()
        before = trainer.now()
        lazy_save(ckpt, trainer, 2)
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        threading.Timer(0.2, stream.free.set).start()
        ckpt.wait_captured()
        assert snapshot.copier.is_read
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()
    assert_same(saved(tmp_path / "disk", 2), before)


def test_wait_captured_that_runs_out_of_time_gives_the_snapshot_up(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        handle = lazy_save(ckpt, trainer, 2)
        with pytest.raises(CaptureError, match="the snapshot is given up"):
            ckpt.wait_captured(timeout=0.05)
        stream.free.set()
        with pytest.raises(CaptureError):
            handle.wait(timeout=PATIENCE_S)
        trainer.step()
        before = trainer.now()
        ckpt.save(3, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 3), before)


def test_a_change_before_the_barrier_is_found_there(
    make_config: MakeConfig, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        handle = lazy_save(ckpt, trainer, 2)
        with torch.no_grad():
            trainer.model[0].weight.add_(1)
        ckpt._capturer._at_barrier()
        stream.free.set()
        with pytest.raises(CaptureError, match=r'state\["model"\]\["0.weight"\] was changed'):
            handle.wait(timeout=PATIENCE_S)
        assert handle.outcome is SaveOutcome.FAILED


@pytest.mark.parametrize("into", ["host", "slab"])
def test_what_replaces_the_data_of_a_tensor_is_not_captured(
    make_config: MakeConfig,
    places: FakePlaces,
    slab: DeviceSlab,
    held: Held,
    tmp_path: Path,
    into: str,
) -> None:
    """As a loop does that moves an optimizer's state to host memory: the values of the call are kept until read."""
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        for moments in trainer.optimizer.state.values():
            moments["exp_avg"].data = torch.full_like(moments["exp_avg"], 7.0)
        if into == "slab":
            trainer.step()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
        assert handle.outcome is SaveOutcome.SAVED
        trainer.step()
        lazy_save(ckpt, trainer, 3).wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


@pytest.mark.parametrize("into", ["host", "slab"])
def test_the_address_of_memory_that_was_freed_is_not_read(
    make_config: MakeConfig,
    places: FakePlaces,
    slab: DeviceSlab,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    into: str,
) -> None:
    """It may not be mapped any more, which ends the process."""
    trainer, sources, copy = Trainer(), list[int](), FakeStream.copy_memory

    def recorded(stream: FakeStream, copies: MemoryCopies) -> None:
        sources.extend(copies.sources.tolist())
        copy(stream, copies)

    monkeypatch.setattr(FakeStream, "copy_memory", recorded)
    # As if the memory was freed right after the barrier's check.
    monkeypatch.setattr(ImageCopier, "check_state", lambda copier: None)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        moment = trainer.optimizer.state[trainer.model[0].weight]["exp_avg"]
        address, size = moment.data_ptr(), moment.nbytes
        torch.ops.inductor.resize_storage_bytes_(moment, 0)  # a call that nobody sees
        sources.clear()
        if into == "slab":
            ckpt._capturer._at_barrier()
        held.free.set()
        with pytest.raises(CaptureError, match=r'\["exp_avg"\] was changed'):
            handle.wait(timeout=PATIENCE_S)
        assert not any(address <= each < address + size for each in sources)
        wait_until(lambda: slab.free_bytes == SLAB_BYTES, "its blocks are back")


def test_a_model_that_leaves_its_device_frees_memory_there_once_it_is_read(
    make_config: MakeConfig,
    places: FakePlaces,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Not only at the next step: a loop that generates text meanwhile needs the memory."""
    monkeypatch.setattr(capturer, "SETTLED_S", PATIENCE_S)
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        tensors: list[torch.Tensor] = [*trainer.model.parameters()]
        tensors += [
            t for m in trainer.optimizer.state.values() for t in m.values() if t.numel() > 1
        ]
        storages = [tensor.untyped_storage() for tensor in tensors]
        for tensor in tensors:
            tensor.data = torch.zeros_like(tensor)
        wait_until(lambda: not any(map(storage_uses, storages)), "nothing refers to the memory")
        assert not handle.done()
        ckpt.wait_captured()
    assert_same(saved(tmp_path / "disk", 2), before)


def test_an_update_behind_the_barrier_is_no_change(
    make_config: MakeConfig, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        handle = lazy_save(ckpt, trainer, 2)
        ckpt._capturer._at_barrier()
        with (
            torch.no_grad()
        ):  # on a device the update comes after the copies; versions rise at once
            trainer.model[0].weight.add_(0.0)
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)
        assert handle.outcome is SaveOutcome.SAVED


@pytest.mark.parametrize("lazy", [True, False])
def test_what_a_device_reports_fails_the_save_and_wedges_nothing(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, lazy: bool
) -> None:
    stream, trainer = places.stream, Trainer()
    mode = {"mode": "lazy" if lazy else "blocking"}
    with tierfall.open({**make_config(chunk="4KiB"), "capture": mode}) as ckpt:
        warmed_up(ckpt, trainer)
        stream.fails = RuntimeError("an illegal memory access")
        if lazy:
            handle = lazy_save(ckpt, trainer, 2)
            trainer.step()
            with pytest.raises(CaptureError, match="an illegal memory access"):
                handle.wait(timeout=PATIENCE_S)
        else:
            with pytest.raises(CaptureError, match="an illegal memory access"):
                ckpt.save(2, trainer.state)
        trainer.step()
        before = trainer.now()
        ckpt.save(3, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 3), before)


@pytest.mark.parametrize("swapped_back", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_a_write_before_the_copies_that_no_counter_sees_fails_the_save(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, turned: bool, swapped_back: bool
) -> None:
    trainer = Trainer(fused=True)
    weight = trainer.model[0].weight
    if turned:
        weight.data = weight.data.t().contiguous().t()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        good = lazy_save(ckpt, trainer, 2)
        trainer.step()
        good.wait(timeout=PATIENCE_S)
        places.stream.free.clear()
        bad = lazy_save(ckpt, trainer, 3)
        weight.data.add_(1)
        places.stream.free.set()
        places.stream.finish()
        if swapped_back:
            weight.data.sub_(1)
        trainer.step()
        with pytest.raises(CaptureError, match=r'state\["model"\]\["0.weight"\] was changed'):
            bad.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


@pytest.mark.parametrize("kind", ["an odd number", "complex and turned"])
def test_a_write_to_the_last_element_on_a_device_that_no_counter_sees_fails_the_save(
    make_config: MakeConfig, places: FakePlaces, kind: str
) -> None:
    trainer = Trainer(fused=True)
    more = torch.randn(33)
    if kind == "complex and turned":
        more = torch.randn(4, 8, dtype=torch.complex128).t()
    trainer.state["more"] = tierfall.item(more, changes="on_step")
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        places.stream.free.clear()
        bad = lazy_save(ckpt, trainer, 2)
        more.data[-1] += 1
        places.stream.free.set()
        places.stream.finish()
        trainer.step()
        with pytest.raises(CaptureError, match=r'state\["more"\] was changed'):
            bad.wait(timeout=PATIENCE_S)


def test_a_step_that_is_recorded_into_a_graph_is_no_barrier(
    make_config: MakeConfig, places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        places.stream.free.clear()
        handle = lazy_save(ckpt, trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(barrier, "is_recording", lambda: True)
            trainer.step()
        places.stream.free.set()
        with pytest.raises(CaptureError, match="recorded into a CUDA graph"):
            handle.wait(timeout=PATIENCE_S)
        assert not ckpt.save(3, trainer.state, block=True).stats.lazy


def test_whoever_steps_next_is_held_too_as_long_as_the_state_is_read(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    """The first to step may be an optimizer on another stream, which the second does not wait for."""
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        before, holds = trainer.now(), stream.holds
        handle = lazy_save(ckpt, trainer, 2)
        probe = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        thread = threading.Thread(target=probe.step)
        thread.start()
        thread.join(PATIENCE_S)
        assert stream.holds == holds + 1
        stream.blocks = True
        trainer.backward()
        step = threading.Thread(target=trainer.optimizer.step)
        step.start()
        wait_until(lambda: stream.holds == holds + 2, "it is held too")
        assert_same(trainer.now(), before)
        stream.free.set()
        step.join(PATIENCE_S)
        handle.wait(timeout=PATIENCE_S)
        holds = stream.holds
        probe.step()
        probe.step()
        assert stream.holds <= holds + 1, "nothing reads the state any more"
    assert_same(saved(tmp_path / "disk", 2), before)


def test_wait_captured_behind_a_step_waits_for_what_is_still_read(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        stream.free.clear()
        stream.blocks = False
        before = trainer.now()
        lazy_save(ckpt, trainer, 2)
        ckpt._capturer._at_barrier()
        copies = [*stream.enqueued]
        threading.Timer(0.2, stream.free.set).start()
        ckpt.wait_captured()
        assert copies
        assert all(mark.is_done() for mark in copies)
        trainer.model[0].weight.data.zero_()
    assert_same(saved(tmp_path / "disk", 2), before)


def test_a_copy_counts_before_it_is_taken_for_landed(
    make_config: MakeConfig, places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread and the capture thread wait for the last copy together."""
    trainer, count = Trainer(), ImageCopier._count

    def slow(filling: ImageCopier, segment: Any) -> None:
        time.sleep(0.005)
        count(filling, segment)

    monkeypatch.setattr(ImageCopier, "_count", slow)
    with tierfall.open({**make_config(chunk="4KiB"), "capture": {"mode": "blocking"}}) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, trainer.state).captured(timeout=PATIENCE_S)


@pytest.mark.usefixtures("slab")
def test_an_interrupt_at_the_barrier_leaves_captures_going(
    make_config: MakeConfig, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()

    def interrupted(filling: ImageCopier, spill: object) -> None:
        raise KeyboardInterrupt

    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "_fill", interrupted)
            handle = lazy_save(ckpt, trainer, 2)
            with pytest.raises(KeyboardInterrupt):
                trainer.step()
        held.free.set()
        with pytest.raises(CaptureError, match="interrupted"):
            handle.wait(timeout=PATIENCE_S)
        trainer.step()
        before = trainer.now()
        ckpt.save(3, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 3), before)


def test_a_launch_that_is_refused_is_reported_as_it_was(
    make_config: MakeConfig, places: FakePlaces, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        places.stream.refuses = RuntimeError("CUDA error: launch")
        trainer.step()
        places.stream.refuses = None
        held.free.set()
        with pytest.raises(CaptureError, match="CUDA error: launch") as caught:
            handle.wait(timeout=PATIENCE_S)
        assert "interrupted" not in str(caught.value)
        assert isinstance(caught.value.__context__, RuntimeError | CaptureError)


def test_an_optimizer_whose_step_was_recorded_is_no_evidence_any_more(
    make_config: MakeConfig, places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual recipe: steps to warm up, then one that is recorded, then replays, which no hook sees."""
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(barrier, "is_recording", lambda: True)
            trainer.step()
        assert not ckpt.save(2, trainer.state, block=True).stats.lazy
        trainer.step()
        assert not ckpt.save(3, trainer.state, block=True).stats.lazy
        ckpt.wait_captured()
        assert ckpt.save(4, trainer.state).stats.lazy, "bracketed by hand it is"


# With a slab -----------------------------------------------------------------------------------------


def test_with_room_in_the_slab_the_update_waits_for_nothing(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, slab: DeviceSlab, held: Held
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        assert slab.free_bytes == SLAB_BYTES
        stream.free.clear()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.step()  # though no copy to the host can run
        assert slab.free_bytes < SLAB_BYTES
        assert not handle.done("host")
        assert any(not torch.equal(before[n], after) for n, after in trainer.now().items())
        held.free.set()
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)
        assert slab.free_bytes == SLAB_BYTES
    assert_same(saved(tmp_path / "disk", 2), before)


def test_whoever_steps_next_is_held_too_while_the_slab_is_filled(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, slab: DeviceSlab, held: Held
) -> None:
    """The copies into it are in the order of one stream; a second optimizer may be on another."""
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        before, stream.busy = trainer.now(), True
        handle = lazy_save(ckpt, trainer, 2)
        trainer.step()
        probe = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        holds = stream.holds
        probe.step()
        assert stream.holds == holds + 1
        for mark in stream.marks:
            mark.done.set()
        probe.step()
        holds = stream.holds
        probe.step()
        assert stream.holds == holds, "nothing reads the state any more"
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_a_slab_that_takes_a_part_shortens_the_wait_and_loses_nothing(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, held: Held
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        places.memory = DeviceSlab(torch.zeros(bytes_of_state(trainer) // 2, dtype=torch.uint8))
        held.hold()
        stream.free.clear()
        before, launched, holds = trainer.now(), len(stream.enqueued), stream.holds
        handle = lazy_save(ckpt, trainer, 2)
        trainer.backward()
        step = threading.Thread(target=trainer.optimizer.step)
        step.start()
        wait_until(lambda: stream.holds > holds, "the hook waits for what found no room")
        assert len(stream.enqueued) > launched
        stream.free.set()
        step.join(PATIENCE_S)
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
        assert places.memory.free_bytes == bytes_of_state(trainer) // 2
    assert_same(saved(tmp_path / "disk", 2), before)


@pytest.mark.parametrize("batches", [True, False], ids=["by address", "by tensor"])
def test_many_steps_through_a_slab_keep_their_own_values(
    batches: bool, make_config: MakeConfig, tmp_path: Path, places: FakePlaces, slab: DeviceSlab
) -> None:
    places.stream.batches = batches
    trainer = Trainer(fused=True)
    wanted = {}
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 22):
            wanted[step] = trainer.now()
            lazy_save(ckpt, trainer, step)
            trainer.step()
        ckpt.drain()
        assert slab.free_bytes == SLAB_BYTES
    for step, before in wanted.items():
        assert_same(saved(tmp_path / "disk", step), before)


@pytest.mark.parametrize("trouble", ["fails", "refuses"])
def test_a_slab_is_free_again_after_a_capture_that_failed(
    make_config: MakeConfig, places: FakePlaces, slab: DeviceSlab, held: Held, trouble: str
) -> None:
    """A copy that was launched fails, or a launch is refused at the barrier."""
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        setattr(places.stream, trouble, RuntimeError("CUDA error"))
        trainer.step()
        places.stream.refuses = None
        held.free.set()
        with pytest.raises(CaptureError):
            handle.wait(timeout=PATIENCE_S)
        wait_until(lambda: slab.free_bytes == SLAB_BYTES, "its blocks are back")


@pytest.mark.parametrize("trouble", ["time", "copy"])
def test_a_barrier_that_fails_with_a_slab_reports_why(
    make_config: MakeConfig,
    places: FakePlaces,
    slab: DeviceSlab,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    """The capture thread goes on before the barrier reports it, and finds part of the state in no queue."""
    trainer, fail, waits = Trainer(), ImageCopier.fail, threading.Event()

    def late(copier: ImageCopier, error: BaseException, **options: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            waits.wait(0.5)
        fail(copier, error, **options)

    def refused(copier: ImageCopier, spill: object) -> None:
        raise RuntimeError("CUDA error: no such copy")

    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            # The capture thread is slow, so that much is left for the slab.
            patch.setattr(ImageCopier, "_throttle", lambda copier: time.sleep(0.02))
            patch.setattr(ImageCopier, "fail", late)
            if trouble == "copy":
                patch.setattr(ImageCopier, "_fill", refused)
            else:
                patch.setattr(
                    ImageCopier, "wait_idle", lambda copier, timeout=None: timeout is None
                )
            handle = lazy_save(ckpt, trainer, 2)
            trainer.step()
        with pytest.raises(CaptureError) as caught:
            handle.wait(timeout=PATIENCE_S)
        assert ("no such copy" if trouble == "copy" else "max_wait") in str(caught.value)
        wait_until(lambda: slab.free_bytes == SLAB_BYTES, "its blocks are back")


def test_an_interrupt_between_claim_and_launch_leaves_the_slab_free(
    make_config: MakeConfig,
    places: FakePlaces,
    slab: DeviceSlab,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, launch = Trainer(), ImageCopier._launch

    def interrupted(copier: ImageCopier, segment: Any, spill: Any = None) -> None:
        if spill is not None:
            raise KeyboardInterrupt
        launch(copier, segment)

    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.step()
        assert slab.free_bytes < SLAB_BYTES
        monkeypatch.setattr(ImageCopier, "_launch", interrupted)
        held.free.set()
        with pytest.raises(CaptureError, match="interrupted"):
            handle.wait(timeout=PATIENCE_S)
        wait_until(lambda: slab.free_bytes == SLAB_BYTES, "its blocks are back")


def test_a_change_before_the_barrier_is_found_in_what_went_to_the_slab(
    make_config: MakeConfig, places: FakePlaces, slab: DeviceSlab, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with torch.no_grad():
            trainer.model[0].weight.add_(1)
        trainer.step()
        held.free.set()
        with pytest.raises(CaptureError, match="was changed"):
            handle.wait(timeout=PATIENCE_S)
        assert slab.free_bytes == SLAB_BYTES


# Opening it ------------------------------------------------------------------------------------------


def test_a_state_that_is_not_on_a_gpu_leaves_the_device_tier_out_and_that_is_reported_once(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    config["tiers"].insert(0, {"name": "spare", "kind": "device", "capacity": "1MiB"})
    trainer = Trainer()
    with caplog.at_level(logging.WARNING), tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 2).wait(timeout=PATIENCE_S)
        (info, *_) = ckpt.checkpoints()
        assert "spare" not in info.tiers
    output = [r.getMessage() for r in caplog.records if "spare" in r.getMessage()]
    assert output == ["save: goes on without tier spare: the state is not on a CUDA device"]


def test_a_device_without_so_much_room_is_reported_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: Any = DeviceSlab.allocate(1 << 60, torch.device("cpu"), name="spare")
    assert made is None
    assert "save: goes on without tier spare: cpu cannot allocate" in caplog.text


def test_a_save_comes_after_the_streams_that_optimizers_stepped_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop may update on a stream of its own, and save on another without joining it."""

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited_for.append(other)

    default, side = Stream(), Stream()
    current = default
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        monkeypatch.setattr(streams.torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(streams.torch.cuda, "current_stream", lambda device=None: current)
        trainer.backward()
        current = side
        trainer.optimizer.step()
        current = default
        trainer.step()
        ckpt.save(1, trainer.state).wait()
        assert default.waited_for == [side]
        trainer.step()
        ckpt.save(2, trainer.state).wait()
        assert default.waited_for == [side]
        monkeypatch.undo()


def test_a_scaler_is_saved_without_waiting_for_its_numbers(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for all that the device has to do."""

    def read(number: torch.Tensor) -> float:
        raise AssertionError("the host waits for the device")

    scaler, trainer = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), Trainer()
    trainer.scaled_step(scaler, overflow=False)
    trainer.scaled_step(scaler, overflow=True)
    expected = scaler.state_dict()
    with tierfall.open(make_config()) as ckpt, monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", read)
        ckpt.save(1, {"scaler": scaler}, block=True)
    used, fresh = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    trainer.scaled_step(used, overflow=False)
    for other in (used, fresh):
        with tierfall.open(make_config()) as ckpt:
            ckpt.restore({"scaler": other})
        assert other.state_dict() == expected
        assert type(other.state_dict()["scale"]) is float
    assert json.dumps(tierfall.load(make_config())["scaler"]) == json.dumps(expected)


# The slab --------------------------------------------------------------------------------------------


def test_parts_in_a_slab_begin_at_multiples_of_16_bytes(
    make_config: MakeConfig,
    places: FakePlaces,
    slab: DeviceSlab,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel copies 16 bytes at once there, and single bytes from an odd number of bf16 values on otherwise."""
    targets, copy = list[int](), FakeStream.copy_memory

    def recorded(stream: FakeStream, copies: MemoryCopies) -> None:
        targets.extend(copies.targets.tolist())
        copy(stream, copies)

    monkeypatch.setattr(FakeStream, "copy_memory", recorded)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(101).bfloat16()) for _ in range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        for step in (1, 2):
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            held.hold()
            ckpt.save(step, {"model": model, "optimizer": optimizer})
            targets.clear()
            optimizer.step()
            held.free.set()
            ckpt.wait_captured()
    low, high = slab._memory.data_ptr(), slab._memory.data_ptr() + SLAB_BYTES
    inside = [target for target in targets if low <= target < high]
    assert len(inside) >= 9  # a parameter in two chunks has two parts
    assert not any(target % 16 for target in inside)


def test_blocks_of_a_slab_do_not_overlap_and_come_back() -> None:
    slab = DeviceSlab(torch.zeros(8 * 512, dtype=torch.uint8))
    blocks = [slab.reserve(700) for _ in range(4)]
    assert all(block is not None and block.tensor.numel() == 700 for block in blocks)
    starts = sorted(block.tensor.storage_offset() for block in blocks if block)
    assert starts == [0, 1024, 2048, 3072]
    assert slab.reserve(1) is None
    assert slab.free_bytes == 0
    for block in (blocks[1], blocks[2]):
        assert block is not None
        block.release()
        block.release()
    assert slab.free_bytes == 2048
    assert slab.reserve(2049) is None
    between = slab.reserve(2048)
    assert between is not None
    assert between.tensor.storage_offset() == 1024


# Where things are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_end", [False, True])
def test_a_number_on_a_device_is_the_one_that_was_given(
    make_config: MakeConfig, places: FakePlaces, at_end: bool
) -> None:
    """It is copied there, in the order of the caller's work, and read later."""
    trainer, loss = Trainer(), torch.tensor(2.5).as_subclass(OnDevice)
    config = {**make_config(), "interval": {"every": 100 if at_end else 1, "at_end": at_end}}
    with tierfall.open(config) as ckpt:
        places.stream.free.clear()
        threading.Timer(0.2, places.stream.free.set).start()
        trainer.step()
        ckpt.maybe_save(1, trainer.state, metrics={"loss": loss})
        loss.zero_()
    with tierfall.open(config) as ckpt:
        assert [info.metrics for info in ckpt.checkpoints()] == [{"loss": 2.5}]


def test_a_number_is_read_at_once_only_where_nothing_captured_comes_after_it() -> None:
    """A device that is none stands in: what counts is which device a number is on, and what of the state is there."""

    class Number:
        is_cpu = False

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)
            self.read = False

        def detach(self) -> Number:
            return self

        def clone(self) -> float:
            return 2.5  # in the caller's order

        def __float__(self) -> float:
            self.read = True
            return 2.5

    class Streams:
        def of(self, device: torch.device) -> FakeStream | None:
            return None if device.type == "mps" else FakeStream()

    places: Any = module_places.CaptureDevices(Streams())  # type: ignore[arg-type]
    places._has_devices = True
    here, there, other = (Number(name) for name in ("cuda:0", "cuda:1", "mps"))
    at = places.places_of([here, torch.ones(1), here])
    assert at == (0, HOST, 0)
    later = places.present_value(here, at)
    assert places.present_value(there, at) == 2.5
    assert places.present_value(other, at) == 2.5
    assert (here.read, there.read, other.read) == (False, True, True)
    assert not places.streams[0].enqueued
    assert float(later) == 2.5, (
        "read on the copy stream, which waits for nothing that training does meanwhile"
    )
    assert len(places.streams[0].enqueued) == 1
    assert places.present_value(torch.ones(1), at) == 1
    assert places.places_of([other]) == (HOST,)
    assert places.without_stream == {"mps"}
    assert places.places_of([torch.ones(1)]) == ()
    for stream in places.streams.values():
        stream.close()
