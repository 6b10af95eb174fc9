"""Lazy capture off a device: the host waits for nothing, the device's own order guards the state; on a fake device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

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
from tests.core.fake_device import THERE, FakePlaces, FakeStream, OnDevice
from tests.steps import wait_until
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.spill import DeviceSlab
from tierfall.core.image.segments import HOST
from tierfall.core.runtime.memory_copies import MemoryCopies
from tierfall.core.sampling.ranges import RangeDigests
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.values import SaveOutcome
from tierfall.run import saver

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


@pytest.mark.parametrize(
    ("kind", "batches"), [("foreach", True), ("fused", True), ("plain", False)]
)
def test_the_values_before_the_step_are_captured(
    kind: str, batches: bool, make_config: MakeConfig, tmp_path: Path, places: FakePlaces
) -> None:
    places.stream.batches = batches
    trainer = Trainer(**OPTIMIZERS[kind])
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        wanted = {}
        for step in range(2, 6):
            wanted[step] = trainer.now()
            lazy_save(ckpt, trainer, step)
            trainer.step()
        ckpt.drain()
    for step, before in wanted.items():
        assert_same(saved(tmp_path / "disk", step), before)


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


def test_what_replaces_the_data_of_a_tensor_in_host_memory_beside_a_device_fails_the_save(
    make_config: MakeConfig, places: FakePlaces, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples alone would miss one element that is written to the old data then."""
    trainer = Trainer()
    trainer.model.append(torch.nn.Linear(300, 1000, bias=False))
    trainer.model.forward = trainer.model[:2].forward  # type: ignore[method-assign]
    weight = trainer.model[2].weight
    weight.grad = torch.zeros_like(weight)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1)
    trainer.state["optimizer"] = trainer.optimizer

    def places_of(sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(HOST if s.shape == weight.shape else THERE for s in sources)

    monkeypatch.setattr(places, "places_of", places_of)
    monkeypatch.setattr(RangeDigests, "digest", lambda *given: {})  # it is the turn of other ranges
    with tierfall.open(make_config(host={"capacity": "16MiB"})) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        moment = trainer.optimizer.state[weight]["exp_avg"]
        data = moment.data
        moment.data = data.clone()
        data.view(-1)[123_457] = 7.0
        held.free.set()
        with pytest.raises(CaptureError, match="was changed"):
            handle.wait(timeout=PATIENCE_S)


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
        wait_until(lambda: slab.largest_free_bytes == SLAB_BYTES, "its blocks are back")


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


@pytest.mark.parametrize(("turned", "swapped_back"), [(True, True), (False, False)])
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


# With a slab -----------------------------------------------------------------------------------------


def test_with_room_in_the_slab_the_update_waits_for_nothing(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, slab: DeviceSlab, held: Held
) -> None:
    stream, trainer = places.stream, Trainer()
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        assert slab.largest_free_bytes == SLAB_BYTES
        stream.free.clear()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.step()  # though no copy to the host can run
        assert slab.largest_free_bytes < SLAB_BYTES
        assert not handle.done("host")
        assert any(not torch.equal(before[n], after) for n, after in trainer.now().items())
        held.free.set()
        stream.free.set()
        handle.wait(timeout=PATIENCE_S)
        assert slab.largest_free_bytes == SLAB_BYTES
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
        assert places.memory.largest_free_bytes == bytes_of_state(trainer) // 2 // 512 * 512
    assert_same(saved(tmp_path / "disk", 2), before)


def test_many_steps_through_a_slab_keep_their_own_values(
    make_config: MakeConfig, tmp_path: Path, places: FakePlaces, slab: DeviceSlab
) -> None:
    trainer = Trainer(fused=True)
    wanted = {}
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 10):
            wanted[step] = trainer.now()
            lazy_save(ckpt, trainer, step)
            trainer.step()
        ckpt.drain()
        assert slab.largest_free_bytes == SLAB_BYTES
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
        wait_until(lambda: slab.largest_free_bytes == SLAB_BYTES, "its blocks are back")


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
