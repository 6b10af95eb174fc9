"""A save whose capture fails: it is reported, leaves nothing behind, and the next save works."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
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
    lazy_save,
    saved,
    warmed_up,
)
from tests.steps import wait_until
from tierfall.core.capture import capturer
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.errors import StateChangedError
from tierfall.core.types.values import SaveOutcome

pytestmark = pytest.mark.usefixtures("small_segments")


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


def test_an_image_for_which_no_barrier_comes_is_not_sealed_over_a_change(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturer, "SETTLED_S", 0.2)
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handle = lazy_save(ckpt, trainer, 2)
        trainer.model[1].bias.data.add_(1)
        assert isinstance(failed(handle), StateChangedError)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_a_frozen_parameter_that_changes_takes_the_trust_from_all_of_them(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """As a momentum encoder that forward moves on."""
    trainer = Trainer()
    target = torch.nn.ModuleList([torch.nn.Linear(30, 30) for _ in range(4)]).requires_grad_(False)
    trainer.state["target"] = target
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handles, wanted = [], {}
        for step in range(2, 6):
            wanted[step] = {k: v.clone() for k, v in target.state_dict().items()}
            handles.append(lazy_save(ckpt, trainer, step))
            target[step % 4].weight.data.mul_(0.9)  # another one each time
            trainer.step()
        assert isinstance(failed(handles[0]), StateChangedError)
        for handle in handles[1:]:
            handle.wait(timeout=PATIENCE_S)
    for step in range(3, 6):
        assert_same(dict(tierfall.load(tmp_path / "disk", step=step)["target"]), wanted[step])


def test_after_two_failures_in_a_row_saves_capture_blocking_and_that_is_reported_once(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, wanted = Trainer(), {}
    parameters = dict(trainer.model.named_parameters())
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        for step, name in zip(range(2, 6), parameters, strict=True):
            wanted[step] = trainer.now()
            handle = ckpt.save(step, trainer.state)
            parameters[name].data.mul_(0.9)  # another one each time
            trainer.step()
            if step < 4:
                assert handle.stats.lazy
                assert isinstance(failed(handle), StateChangedError)
            else:
                assert not handle.stats.lazy
                handle.wait(timeout=PATIENCE_S)
    for step in (4, 5):
        assert_same(saved(tmp_path / "disk", step), wanted[step])
    reasons = [r.getMessage() for r in caplog.records if "captures blocking" in r.getMessage()]
    assert len(reasons) == 1
    assert "2 saves in a row were given up" in reasons[0]
    assert "wait_captured()" in reasons[0]


def replace_moments(trainer: Trainer) -> None:
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    for entries in trainer.optimizer.state.values():
        entries["exp_avg"].zero_()


def swap_weights(trainer: Trainer) -> None:
    for layer in trainer.model:
        torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.zeros_like(layer.weight)))


def assign(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    "change",
    [replace_moments, swap_weights, assign],
    ids=["replaced", "swapped", "assigned"],
)
def test_tensors_that_leave_the_state_under_capture_are_saved_as_they_were(
    make_config: MakeConfig, tmp_path: Path, held: Held, change: Callable[[Trainer], None]
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        change(trainer)
        gc.collect()
        over = [torch.full((4000,), -7.0) for _ in range(100)]  # where they were, if they are gone
        held.free.set()
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
        still_saves_twice(ckpt, trainer, tmp_path / "disk")
    assert len(over) == 100
    assert_same(saved(tmp_path / "disk", 2), before)


def still_saves_twice(ckpt: tierfall.Checkpointer, trainer: Trainer, disk: Path) -> None:
    for step in (3, 4):
        before = trainer.now()
        handle = ckpt.save(step, trainer.state)
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
        assert_same(saved(disk, step), before)


def test_another_thread_that_waits_is_no_barrier(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that trains may be in the middle of a write, whose counter rises at its end."""
    monkeypatch.setattr(capturer, "SETTLED_S", PATIENCE_S)
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handle = lazy_save(ckpt, trainer, 2)
        waiter = threading.Thread(target=handle.wait)
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        trainer.step()
        waiter.join(PATIENCE_S)
        assert handle.outcome is SaveOutcome.SAVED


# Where else it may fail ------------------------------------------------------------------------------


def test_a_failed_capture_keeps_no_tensor_alive(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handle holds the error, the error its traceback, and that its frames: those are emptied."""
    trainer = Trainer()
    copy = ImageCopier.copy_next

    def broken(filling: ImageCopier, *words: Any) -> bool:
        sources = list(filling._sources._tensors)
        copy(filling)
        raise RuntimeError(f"broken after {len(sources)} tensors")

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        monkeypatch.setattr(ImageCopier, "copy_next", broken)
        handle = lazy_save(ckpt, trainer, 2)
        error = failed(handle)
        monkeypatch.setattr(ImageCopier, "copy_next", copy)
        trainer.step()
        watched = weakref.ref(trainer.model[0])
        weights = weakref.ref(trainer.model[0].weight)
        trainer = Trainer()
        gc.collect()
        assert watched() is None
        assert weights() is None
        assert "broken after" in str(handle.exception() or error)
