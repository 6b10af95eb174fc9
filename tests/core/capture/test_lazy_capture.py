"""That capture is lazy where it says so, and right all the same: the barrier, its evidence, and what it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.steps import wait_until
from tierfall.core.capture import filling as module
from tierfall.core.capture.filling import Filling
from tierfall.core.errors import CaptureError
from tierfall.core.handle import SaveHandle
from tierfall.core.values import SaveOutcome

MakeConfig = Callable[..., dict[str, Any]]
PATIENCE_S = 20.0
OPTIMIZERS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 4096)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 8192)


class Held:
    """The capture thread, standing still before it has copied anything, for as long as ``free`` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Event()
        self.free = threading.Event()
        self.fillings: list[Filling] = []
        original = Filling.run

        def run(filling: Filling) -> None:
            self.fillings.append(filling)
            self.arrived.set()
            assert self.free.wait(PATIENCE_S)
            original(filling)

        monkeypatch.setattr(Filling, "run", run)

    def hold(self) -> None:
        self.free.clear()
        self.arrived.clear()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    held.free.set()
    yield held
    held.free.set()


class Trainer:
    """A small model in training, and copies of what it was."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 100), torch.nn.Linear(100, 40))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(4, 40)).pow(2).mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def now(self) -> dict[str, torch.Tensor]:
        """Every bit that a step changes."""
        found = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": v.clone() for k, v in moments.items()}
        return found


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """What a tier holds of a step, named as ``Trainer.now`` does."""
    loaded = tierfall.load(folder, step=step)
    found = {f"model.{k}": v for k, v in loaded["model"].items()}
    for number, moments in loaded["optimizer"]["state"].items():
        found |= {f"optimizer.{number}.{k}": v for k, v in moments.items()}
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def lazy_save(
    ckpt: tierfall.Checkpointer, trainer: Trainer, step: int, **options: Any
) -> SaveHandle:
    handle = ckpt.save(step, trainer.state, **options)
    assert handle.stats.lazy
    return handle


def warmed_up(ckpt: tierfall.Checkpointer, trainer: Trainer) -> None:
    """The first save captures blocking; after it a step is seen."""
    trainer.step()
    assert not ckpt.save(1, trainer.state, block=True).stats.lazy
    trainer.step()


# Lazy, and right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_save_returns_with_nothing_copied_and_the_step_waits_for_the_values_before_it(
    kind: str, make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer(**OPTIMIZERS[kind])
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        assert held.arrived.wait(PATIENCE_S)
        filling = held.fillings[-1]
        assert filling.final_chunks == 0
        assert not filling.copied.is_set()
        trainer.backward()  # needs no capture
        assert not filling.copied.is_set()
        trainer.optimizer.step()  # helps: the capture thread stands still
        assert filling.copied.is_set()
        assert not handle.done("host")
        after = trainer.now()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_step_waits_while_the_capture_thread_is_inside_a_copy(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    inside, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    copy, wait_idle = Filling._copy, Filling.wait_idle

    def slow_copy(filling: Filling, pieces: Any) -> None:
        if threading.current_thread().name.endswith("-capture"):
            inside.set()
            assert go_on.wait(PATIENCE_S)
        copy(filling, pieces)

    def told_wait_idle(filling: Filling, timeout: float | None = None) -> bool:
        waiting.set()
        return wait_idle(filling, timeout)

    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        monkeypatch.setattr(Filling, "_copy", slow_copy)
        monkeypatch.setattr(Filling, "wait_idle", told_wait_idle)
        handle = lazy_save(ckpt, trainer, 2)
        assert inside.wait(PATIENCE_S)
        trainer.backward()
        stepping = threading.Thread(target=trainer.optimizer.step)
        stepping.start()
        assert waiting.wait(PATIENCE_S)  # all else is copied, and one copy is under way
        assert_same(trainer.now(), before)
        go_on.set()
        stepping.join(PATIENCE_S)
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_the_next_save_and_the_end_wait_for_the_capture_too(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        second = trainer.now()
        lazy_save(ckpt, trainer, 2)
        third_handle = ckpt.save(3, trainer.state)  # no step was seen: blocking, and helping
        assert not third_handle.stats.lazy
        held.free.set()
        trainer.step()
        held.hold()
        fourth = trainer.now()
        lazy_save(ckpt, trainer, 4)
        threading.Timer(0.05, held.free.set).start()
    assert_same(saved(tmp_path / "disk", 2), second)
    assert_same(saved(tmp_path / "disk", 3), second)
    assert_same(saved(tmp_path / "disk", 4), fourth)


def test_an_update_outside_of_a_guard_waits_where_wait_captured_is_called(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    """A plain function updates the weights: guard, or wait_captured, brackets it."""
    weight = torch.nn.Parameter(torch.randn(5000))
    state = {"w": weight}

    def update() -> None:
        with torch.no_grad():
            weight.add_(1.0)

    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state, block=True)
        with ckpt.guard():
            update()
        held.hold()
        second = weight.detach().clone()
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        with ckpt.guard():
            update()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
        held.hold()
        third = weight.detach().clone()
        handle = ckpt.save(3, state)
        assert handle.stats.lazy
        ckpt.wait_captured()
        update()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert torch.equal(tierfall.load(tmp_path / "disk", step=2)["w"], second)
    assert torch.equal(tierfall.load(tmp_path / "disk", step=3)["w"], third)


def test_two_optimizers_wait_at_the_first_of_their_steps(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    a, b = Trainer(), Trainer(foreach=True)
    state = {"a": a.model, "b": b.model, "oa": a.optimizer, "ob": b.optimizer}
    with tierfall.open(make_config()) as ckpt:
        a.step()
        b.step()
        ckpt.save(1, state, block=True)
        a.step()
        b.step()
        held.hold()
        before = {**a.model.state_dict()}, {**b.model.state_dict()}
        wanted = tuple({k: v.clone() for k, v in part.items()} for part in before)
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        a.step()
        b.step()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert_same(dict(loaded["a"]), wanted[0])
    assert_same(dict(loaded["b"]), wanted[1])


def test_accumulated_gradients_need_no_barrier_between_their_backwards(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        assert held.arrived.wait(PATIENCE_S)
        for _ in range(3):
            trainer.backward()
        assert ckpt._capturer._current is not None
        assert not ckpt._capturer._current.filling.copied.is_set()
        trainer.optimizer.step()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_what_may_change_at_any_time_is_fixed_before_save_returns(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    ema = torch.randn(3000)
    trainer.state["ema"] = tierfall.item(ema, changes="anytime")
    trainer.state["extra"] = {"epoch": 1}
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        wanted = ema.clone()
        handle = lazy_save(ckpt, trainer, 2)
        ema.zero_()
        trainer.state["extra"]["epoch"] = 2
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert torch.equal(loaded["ema"], wanted)
    assert loaded["extra"] == {"epoch": 1}


# When it is not lazy ---------------------------------------------------------------------------------


def blocking_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "captures blocking" in r.getMessage()]


def test_the_first_save_blocks_and_says_nothing_of_it(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        trainer.step()
        assert not ckpt.save(1, trainer.state).stats.lazy
        trainer.step()
        assert ckpt.save(2, trainer.state).stats.lazy
    assert blocking_reasons(caplog) == []


def test_without_a_step_since_the_last_save_it_blocks_and_says_so_once(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 2)
        for step in (3, 4, 5):
            with torch.no_grad():
                trainer.model[0].weight.fill_(float(step))
            assert not ckpt.save(step, trainer.state).stats.lazy
        trainer.step()
        lazy_save(ckpt, trainer, 6)
    assert len(blocking_reasons(caplog)) == 1
    assert "no optimizer step" in blocking_reasons(caplog)[0]
    for step in (3, 4, 5):
        assert saved(tmp_path / "disk", step)["model.0.weight"].unique().tolist() == [float(step)]


def test_a_step_that_the_scaler_skips_brackets_nothing(make_config: MakeConfig) -> None:
    """GradScaler leaves step out where gradients overflowed: no barrier was seen, so the next save blocks."""
    trainer = Trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(*, overflow: bool) -> None:
        scaler.scale(trainer.model(torch.randn(4, 40)).pow(2).mean()).backward()
        if overflow:
            trainer.model[0].weight.grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(trainer.optimizer)
        scaler.update()
        trainer.optimizer.zero_grad()

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        step(overflow=False)
        lazy_save(ckpt, trainer, 2)
        before = trainer.now()
        step(overflow=True)
        assert_same(trainer.now(), before)
        assert not ckpt.save(3, trainer.state).stats.lazy
        step(overflow=False)
        lazy_save(ckpt, trainer, 4)


def test_an_optimizer_that_is_not_in_the_state_counts_by_its_parameters(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    state = {"model": trainer.model}
    with tierfall.open(make_config()) as ckpt:
        trainer.step()
        ckpt.save(1, state, block=True)
        trainer.step()
        held.hold()
        before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        trainer.step()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(dict(tierfall.load(tmp_path / "disk", step=2)["model"]), before)


def test_a_parameter_that_no_torch_optimizer_steps_makes_saves_block_and_is_named(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, other = Trainer(), torch.nn.Linear(10, 10)
    trainer.state["other"] = other

    def foreign_update() -> None:
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)

    with tierfall.open(make_config()) as ckpt:
        trainer.step()
        ckpt.save(1, trainer.state, block=True)
        for step in (2, 3, 4):
            trainer.step()
            foreign_update()
            wanted = other.weight.detach().clone()
            handle = ckpt.save(step, trainer.state)
            assert not handle.stats.lazy
            foreign_update()
            handle.wait(timeout=PATIENCE_S)
            loaded = tierfall.load(tmp_path / "disk", step=step)
            assert torch.equal(loaded["other"]["weight"], wanted)
    reasons = blocking_reasons(caplog)
    assert len(reasons) == 1
    assert "other.bias" in reasons[0] or "other.weight" in reasons[0]


def test_frozen_parameters_need_no_optimizer(make_config: MakeConfig) -> None:
    trainer = Trainer()
    trainer.state["frozen"] = torch.nn.Linear(10, 10).requires_grad_(False)
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 2)


def test_mode_blocking_never_captures_lazily_and_never_complains(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer()
    config = {**make_config(), "capture": {"mode": "blocking"}}
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            trainer.step()
            before = trainer.now()
            handle = ckpt.save(step, trainer.state)
            assert not handle.stats.lazy
            with torch.no_grad():
                trainer.model[0].weight.zero_()
            handle.wait(timeout=PATIENCE_S)
            assert_same(saved(tmp_path / "disk", step), before)
    assert blocking_reasons(caplog) == []


# Failing ---------------------------------------------------------------------------------------------


def failed(handle: SaveHandle) -> BaseException:
    wait_until(lambda: handle.outcome is not SaveOutcome.PENDING, "the handle tells")
    assert handle.outcome is SaveOutcome.FAILED
    error = handle.exception()
    assert error is not None
    return error


def still_saves(ckpt: tierfall.Checkpointer, trainer: Trainer, step: int, disk: Path) -> None:
    """Whatever went wrong before, the next save is right, and nothing is left of the failed one."""
    before = trainer.now()
    ckpt.save(step, trainer.state, block=True)
    assert_same(saved(disk, step), before)
    assert not list(disk.glob("run/step-00000002-*"))


def test_a_write_between_save_and_barrier_trips_and_gives_the_snapshot_up(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with torch.no_grad():
            trainer.model[1].bias.add_(1.0)
        trainer.step()  # trains on
        held.free.set()
        error = failed(handle)
        assert isinstance(error, CaptureError)
        assert 'state["model"]["1.bias"] was changed' in str(error)
        with pytest.raises(CaptureError, match="was changed"):
            handle.captured()
        still_saves(ckpt, trainer, 3, tmp_path / "disk")
        assert ckpt.statistics().failed_saves == 1


def test_verify_catches_a_write_by_data_that_no_version_shows(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = Trainer()
    config = {**make_config(), "capture": {"verify": True}}
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        handle = lazy_save(ckpt, trainer, 2)
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        wait_until(lambda: snapshot.hashed, "the image is complete")
        assert not handle.done("host")  # the barrier has not agreed yet
        trainer.model[1].bias.data[0] += 1.0
        trainer.step()
        error = failed(handle)
        assert isinstance(error, CaptureError)
        assert "capture.verify found" in str(error)
        assert "1.bias" in str(error)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_verify_agrees_with_what_was_not_changed(make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = Trainer(fused=True)
    config = {**make_config(), "capture": {"verify": True}}
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        second = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
        third = trainer.now()
        handle = lazy_save(ckpt, trainer, 3)
        handle.wait(timeout=PATIENCE_S)  # with no step at all: waiting is the barrier
        fourth_handle = ckpt.save(4, trainer.state)
    assert fourth_handle.outcome is SaveOutcome.SAVED
    assert_same(saved(tmp_path / "disk", 2), second)
    assert_same(saved(tmp_path / "disk", 3), third)


def test_under_verify_a_waiting_thread_and_a_step_at_once_agree(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits on the handle verifies; a step meanwhile must wait for it, not change what it compares."""
    trainer = Trainer()
    verifying, go_on, stepped = threading.Event(), threading.Event(), threading.Event()
    verify = Filling.verify

    def slow_verify(filling: Filling) -> None:
        verifying.set()
        assert go_on.wait(PATIENCE_S)
        verify(filling)

    config = {**make_config(), "capture": {"verify": True}}
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.backward()
        monkeypatch.setattr(Filling, "verify", slow_verify)
        waiter = threading.Thread(target=handle.wait)
        waiter.start()
        assert verifying.wait(PATIENCE_S)

        def step() -> None:
            trainer.optimizer.step()
            stepped.set()

        stepping = threading.Thread(target=step)
        stepping.start()
        stepped.wait(0.2)  # where the step does not wait, this is when it changes the weights
        go_on.set()
        stepping.join(PATIENCE_S)
        waiter.join(PATIENCE_S)
        assert handle.outcome is SaveOutcome.SAVED, handle.exception()
    assert_same(saved(tmp_path / "disk", 2), before)


def test_a_barrier_that_waits_too_long_gives_the_snapshot_up_and_trains_on(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    go_on = threading.Event()
    copy = Filling._copy

    def stuck(filling: Filling, pieces: Any) -> None:
        if threading.current_thread().name.endswith("-capture"):
            inside.set()
            assert go_on.wait(PATIENCE_S)
        copy(filling, pieces)

    inside = threading.Event()
    with tierfall.open(make_config(max_wait="1s")) as ckpt:
        warmed_up(ckpt, trainer)
        monkeypatch.setattr(Filling, "_copy", stuck)
        handle = lazy_save(ckpt, trainer, 2)
        assert inside.wait(PATIENCE_S)
        before = trainer.now()
        trainer.step()
        assert not torch.equal(before["model.0.weight"], trainer.now()["model.0.weight"])
        monkeypatch.setattr(Filling, "_copy", copy)
        go_on.set()
        error = failed(handle)
        assert "the barrier waited 1 s (max_wait)" in str(error)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError("no more"), KeyError("k")])
def test_a_capture_thread_that_stumbles_fails_its_handle_and_no_other(
    error: Exception,
    steps: bool,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer()
    run = Filling.run

    def stumble(filling: Filling) -> None:
        raise error

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        monkeypatch.setattr(Filling, "run", stumble)
        handle = lazy_save(ckpt, trainer, 2)
        assert failed(handle) is error
        monkeypatch.setattr(Filling, "run", run)
        with pytest.raises(CaptureError) as caught:
            handle.captured()
        assert caught.value.__cause__ is error
        if steps:
            trainer.step()
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_a_blocking_capture_that_fails_raises_in_save_and_the_next_one_works(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    copy = Filling.copy_next

    def fail(filling: Filling) -> bool:
        raise RuntimeError("broken")

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 10)
        ckpt.drain()
        monkeypatch.setattr(Filling, "copy_next", fail)
        with pytest.raises(CaptureError, match=r"step 11: .*broken") as caught:
            ckpt.save(11, trainer.state)
        assert isinstance(caught.value.__cause__, RuntimeError)
        monkeypatch.setattr(Filling, "copy_next", copy)
        ckpt.save(12, trainer.state, block=True)
        assert {c.step for c in ckpt.checkpoints()} == {1, 10, 12}


def test_a_loop_that_breaks_with_a_capture_in_flight_leaves_that_step_behind(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer = Trainer()
    before: dict[str, torch.Tensor] = {}

    def loop() -> None:
        with tierfall.open(make_config()) as ckpt:
            warmed_up(ckpt, trainer)
            held.hold()
            before.update(trainer.now())
            lazy_save(ckpt, trainer, 2)
            assert held.arrived.wait(PATIENCE_S)
            threading.Timer(0.05, held.free.set).start()
            raise ZeroDivisionError("loss went wrong")

    with pytest.raises(ZeroDivisionError, match="loss went wrong"):
        loop()
    assert_same(saved(tmp_path / "disk", 2), before)


def test_the_hook_goes_with_the_checkpointer(make_config: MakeConfig) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    hooks = len(_global_optimizer_pre_hooks)
    with tierfall.open(make_config()):
        assert len(_global_optimizer_pre_hooks) == hooks + 1
    assert len(_global_optimizer_pre_hooks) == hooks


def test_a_hook_that_fails_never_breaks_the_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 2)
        calls: list[float | None] = []

        def broken(timeout: float | None) -> None:
            calls.append(timeout)
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(ckpt._capturer, "wait_copied", broken)
            before = trainer.now()
            trainer.step()
        assert calls == [30.0]
        assert not torch.equal(before["model.0.weight"], trainer.now()["model.0.weight"])
