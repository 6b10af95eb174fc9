"""Lazy capture is lazy and correct: the barrier and its evidence."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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

pytestmark = pytest.mark.usefixtures("small_segments")

# Lazy, and right -------------------------------------------------------------------------------------


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
