"""Lazy capture is lazy and correct: the barrier and its evidence."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
from tierfall.core.capture.copier import ImageCopier

pytestmark = pytest.mark.usefixtures("small_segments")

OPTIMIZERS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


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
        assert not filling.copied
        trainer.backward()  # needs no capture
        assert not filling.copied
        trainer.optimizer.step()  # helps: the capture thread stands still
        assert filling.copied
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
    copy, wait_idle = ImageCopier._copy, ImageCopier.wait_idle

    def slow_copy(filling: ImageCopier, pieces: Any) -> None:
        if threading.current_thread().name.endswith("-capture"):
            inside.set()
            assert go_on.wait(PATIENCE_S)
        copy(filling, pieces)

    def told_wait_idle(filling: ImageCopier, timeout: float | None = None) -> bool:
        waiting.set()
        return wait_idle(filling, timeout)

    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        monkeypatch.setattr(ImageCopier, "_copy", slow_copy)
        monkeypatch.setattr(ImageCopier, "wait_idle", told_wait_idle)
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
        assert not ckpt._capturer._current.copier.copied
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

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        trainer.scaled_step(scaler, overflow=False)
        lazy_save(ckpt, trainer, 2)
        before = trainer.now()
        trainer.scaled_step(scaler, overflow=True)
        assert_same(trainer.now(), before)
        assert not ckpt.save(3, trainer.state).stats.lazy
        trainer.scaled_step(scaler, overflow=False)
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


def test_a_parameter_that_no_torch_optimizer_steps_is_copied_at_once_and_named(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, held: Held
) -> None:
    """The rest is captured lazily all the same."""
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
            held.hold()
            before = trainer.now()
            handle = lazy_save(ckpt, trainer, step)
            foreign_update()
            held.free.set()
            handle.wait(timeout=PATIENCE_S)
            loaded = tierfall.load(tmp_path / "disk", step=step)
            assert torch.equal(loaded["other"]["weight"], wanted)
            assert_same(saved(tmp_path / "disk", step), before)
    reasons = [r.getMessage() for r in caplog.records if "copied before save" in r.getMessage()]
    assert len(reasons) == 1
    assert "other.bias" in reasons[0] or "other.weight" in reasons[0]


@pytest.mark.parametrize("changes", ["anytime", "on_step"])
def test_of_a_parameter_that_is_declared_nothing_is_reported(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, changes: Any
) -> None:
    """As of a moving average of the model, which has parameters of its own."""
    trainer = Trainer()
    average = torch.optim.swa_utils.AveragedModel(trainer.model)
    trainer.state["average"] = tierfall.item(average, changes=changes)
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 2)
    assert not [r for r in caplog.records if "copied before save" in r.getMessage()]


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

        def broken(timeout: float | None, *, in_order: bool) -> None:
            calls.append(timeout)
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(ckpt._capturer, "wait_copied", broken)
            before = trainer.now()
            trainer.step()
        assert calls == [30.0]
        assert not torch.equal(before["model.0.weight"], trainer.now()["model.0.weight"])


# Pace ------------------------------------------------------------------------------------------------


def test_a_lazy_capture_keeps_to_its_bandwidth_until_it_is_waited_for(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = Trainer()
    config = {**make_config(chunk="4KiB"), "capture": {"bandwidth": "2KB/s"}}
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        with ThreadPoolExecutor(1) as other, pytest.raises(TimeoutError):
            other.submit(handle.captured, timeout=0.5).result()
        trainer.step()
        assert handle.stats.bytes > 2 * PATIENCE_S * 2_000, "at that pace it would take longer"
        handle.captured(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_a_save_in_inference_mode_spoils_none_after_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = Trainer()
    wanted = {}
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        warmed_up(ckpt, trainer)
        for step in range(2, 12):
            wanted[step] = trainer.now()
            with torch.inference_mode(4 <= step < 7):
                ckpt.save(step, trainer.state, block=True)
            trainer.step()
    for step, before in wanted.items():
        assert_same(saved(tmp_path / "disk", step), before)


class Average:
    """Keeps averages of weights, and hands them out by swapping them in and out, as training code does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._fill(self.kept)
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._fill(weights)
        return found

    def _fill(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(values[name])

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = state


def test_a_state_dict_may_write_to_what_was_met_before(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = Trainer()
    trainer.state["average"] = Average(trainer.model)
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            before = trainer.now()
            ckpt.save(step, trainer.state).wait()
            assert_same(saved(tmp_path / "disk", step), before)
            trainer.step()


def test_a_module_made_in_inference_mode_can_be_saved_again_and_again(
    make_config: MakeConfig,
) -> None:
    trainer = Trainer()
    with torch.inference_mode():
        trainer.state["teacher"] = torch.nn.Linear(4, 4).requires_grad_(False)
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, trainer.state).wait()
            trainer.step()
