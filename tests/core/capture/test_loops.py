"""Loops that write to the state during a capture, or do not use torch optimizers, on the host and on a device."""

from __future__ import annotations

from pathlib import Path

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
from tierfall.core.capture import barrier
from tierfall.core.types.errors import CaptureError

pytestmark = pytest.mark.usefixtures("small_segments")


# With torch optimizers -------------------------------------------------------------------------------


def test_the_capture_goes_on_through_a_step_that_the_scaler_skips(
    make_config: MakeConfig, tmp_path: Path, still: Still
) -> None:
    trainer = Trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        still.hold()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.scaled_step(scaler, overflow=True)
        assert_same(trainer.now(), before)
        assert not handle.done("host"), "nothing waited for it"
        trainer.scaled_step(scaler, overflow=False)
        assert any(not torch.equal(before[n], after) for n, after in trainer.now().items())
        still.go()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_the_first_of_two_optimizers_waits_for_the_state_of_both(
    make_config: MakeConfig, tmp_path: Path, still: Still
) -> None:
    a, b = Trainer(), Trainer(foreach=True)
    state = {"a": a.model, "oa": a.optimizer, "b": b.model, "ob": b.optimizer}

    def now() -> dict[str, torch.Tensor]:
        return {
            **{f"a.{k}": v for k, v in a.now().items()},
            **{f"b.{k}": v for k, v in b.now().items()},
        }

    with tierfall.open(make_config()) as ckpt:
        a.step()
        b.step()
        ckpt.save(1, state, block=True)
        a.step()
        b.step()
        still.hold()
        before = now()
        handle = ckpt.save(2, state)
        assert handle.stats.lazy
        a.step()
        b.step()
        still.go()
        handle.wait(timeout=PATIENCE_S)
    loaded = tierfall.load(tmp_path / "disk", step=2)
    found = {
        f"{each}.model.{name}": tensor for each in "ab" for name, tensor in loaded[each].items()
    }
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name]), name


# Updates that no hook of torch's sees ----------------------------------------------------------------


def descend(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None


def test_what_replays_of_a_graph_change_is_copied_at_once_and_that_is_reported_once(
    make_config: MakeConfig,
    tmp_path: Path,
    still: Still,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay runs the recorded update, and no hook."""
    trainer, other, wanted = Trainer(), Trainer(), {}
    trainer.state["other"] = other.model

    def replay() -> None:
        trainer.backward()
        descend(trainer.model)

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(barrier, "is_recording", lambda: True)
            trainer.step()
        for step in range(2, 4):
            replay()
            trainer.optimizer.step()  # one beside the graph is no evidence of the replays
            other.step()  # nor is another optimizer's
            wanted[step] = trainer.now()
            still.hold()
            lazy_save(ckpt, trainer, step)  # the other model
            replay()  # at once
            still.go()
    for step, before in wanted.items():
        assert_same(saved(tmp_path / "disk", step), before)
    (reason,) = [r.getMessage() for r in caplog.records if "copied before save" in r.getMessage()]
    assert "no torch optimizer was seen to step" in reason
    assert "model.0.bias" in reason


def test_a_step_that_is_recorded_while_a_save_is_under_way_gives_the_save_up(
    make_config: MakeConfig,
    tmp_path: Path,
    still: Still,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        still.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(barrier, "is_recording", lambda: True)
            trainer.step()
        still.go()
        with pytest.raises(CaptureError, match="recorded into a CUDA graph"):
            handle.wait(timeout=PATIENCE_S)
        assert (
            "save: step 2 is given up: save of step 2: an optimizer step was recorded"
            in caplog.text
        )
        before = trainer.now()
        ckpt.save(3, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 3), before)
    assert not list((tmp_path / "disk").glob("run/step-00000002-*"))
