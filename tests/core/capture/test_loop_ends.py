"""The model, a worker or the loop itself ends while a save is captured, on the host and on a device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_help import Still

import tierfall
from tests.core.capture.lazy_help import (
    PATIENCE_S,
    MakeConfig,
    Trainer,
    assert_same,
    lazy_save,
    saved,
    warmed_up,
)
from tests.steps import wait_until
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.values import SaveOutcome

pytestmark = pytest.mark.usefixtures("small_segments")


# Memory that goes ------------------------------------------------------------------------------------


class Borrowed(torch.nn.Module):
    """Parameters in memory that tells when nobody holds it any more."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        arrays = [np.full(elements, float(number), dtype=np.float32) for number in range(count)]
        self.watched = [weakref.ref(array) for array in arrays]
        self.parts = torch.nn.ParameterList(torch.from_numpy(array) for array in arrays)


def test_a_module_that_is_freed_under_capture_lives_until_it_was_read(
    make_config: MakeConfig, tmp_path: Path, still: Still
) -> None:
    model = Borrowed(count=6, elements=2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    watched = model.watched

    def step() -> None:
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    with tierfall.open(make_config()) as ckpt:
        step()
        ckpt.save(1, state, block=True)
        step()
        still.hold()
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        before = {name: value.clone() for name, value in model.state_dict().items()}
        moments = {
            number: entries["momentum_buffer"].clone()
            for number, entries in optimizer.state_dict()["state"].items()
        }
        del model, optimizer
        state.clear()
        gc.collect()
        over = [torch.full((2000,), -7.0) for _ in range(200)]  # where it was, if it is gone
        assert all(each() is not None for each in watched)
        still.go()
        handle.wait(timeout=PATIENCE_S)
        wait_until(lambda: all(each() is None for each in watched), "its memory is let go of")
    assert len(over) == 200
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert_same(dict(loaded["model"]), before)
    assert loaded["optimizer"]["state"].keys() == moments.keys()
    for number, moment in moments.items():
        assert torch.equal(loaded["optimizer"]["state"][number]["momentum_buffer"], moment)


# Workers that die ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "on_error"), [(SystemExit(3), "warn"), (KeyboardInterrupt(), "raise")]
)
def test_what_ends_the_capture_thread_is_the_saves_own_failure_and_no_more(
    make_config: MakeConfig,
    tmp_path: Path,
    still: Still,
    monkeypatch: pytest.MonkeyPatch,
    on_error: str,
    error: BaseException,
) -> None:
    """Not even what would end a program ends the loop: it was not raised there."""
    trainer = Trainer()

    def dies(filling: ImageCopier) -> bool:
        raise error

    with tierfall.open(make_config(on_error=on_error)) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "hash_ready", dies)
            handle = lazy_save(ckpt, trainer, 2)
            trainer.step()  # trains on
            wait_until(lambda: handle.outcome is SaveOutcome.FAILED, "the handle tells")
            trainer.step()
        with pytest.raises(CaptureError) as caught:
            handle.captured()
        assert is_behind(error, caught.value)
        before = trainer.now()
        if on_error == "raise":
            with pytest.raises(Exception) as messages:
                ckpt.save(3, trainer.state)
            assert is_behind(error, messages.value)
        ckpt.save(4, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 4), before)
    assert not list((tmp_path / "disk").glob("run/step-00000002-*"))


def is_behind(error: BaseException, messages: BaseException | None) -> bool:
    """Say whether an exception is another one, or was caused by it."""
    while messages is not None and messages is not error:
        messages = messages.__cause__ or messages.__context__
    return messages is error
