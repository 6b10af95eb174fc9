"""Lazy capture, shown with the capture thread held still, and what a loop gets where it is not possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tierfall
from tests.steps import wait_until
from tierfall.core.capture.copier import ImageCopier
from tierfall.errors import CaptureError, StateChangedError

MakeConfig = Callable[..., dict[str, Any]]


class Loop:
    """A model of 1 MiB, its optimizer, and one update at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(512, 512)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def give_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def update(self) -> None:
        self.give_gradients()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The capture thread does nothing until the event is set; only lazy captures are held."""
    event, run = threading.Event(), ImageCopier.run

    def run_later(self: ImageCopier) -> None:
        assert event.wait(60)
        run(self)

    monkeypatch.setattr(ImageCopier, "run", run_later)
    yield event
    event.set()


def begun(ckpt: tierfall.Checkpointer, loop: Loop) -> None:
    """The first save captures blocking, and one barrier is seen: the next may be lazy."""
    loop.update()
    ckpt.save(1, loop.state)
    loop.update()


def saved_weights(ckpt: tierfall.Checkpointer, step: int) -> torch.Tensor:
    fresh = Loop()
    assert ckpt.restore(fresh.state, step=step) is not None
    return fresh.weights()


def test_a_lazy_save_returns_before_anything_is_copied_and_holds_the_values_before_the_step(
    make_config: MakeConfig, held: threading.Event
) -> None:
    loop = Loop()
    with tierfall.open(make_config(host={"capacity": "32MiB"})) as ckpt:
        begun(ckpt, loop)
        before = loop.weights()
        handle = ckpt.save(2, loop.state)
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        assert handle.stats.lazy
        assert not snapshot.copier.copied  # the capture thread is held: nothing was copied
        assert snapshot.copier.final_chunks == 0
        loop.update()  # helps copying first, and only then changes the weights
        assert snapshot.copier.copied
        assert not torch.equal(loop.weights(), before)
        held.set()
        handle.wait(timeout=60)
        assert torch.equal(saved_weights(ckpt, 2), before)


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_verify_catches_what_version_counters_do_not(
    make_config: MakeConfig, held: threading.Event, verify: object
) -> None:
    loop = Loop()
    config = {**make_config(host={"capacity": "32MiB"}), "capture": {"verify": verify}}
    with tierfall.open(config) as ckpt:
        begun(ckpt, loop)
        handle = ckpt.save(2, loop.state)
        held.set()
        wait_until(lambda: ckpt._capturer._current.copier.copied, "all is copied")  # type: ignore[union-attr]
        loop.model.weight.data.mul_(2)  # after the copy, before the barrier
        loop.update()
        with pytest.raises(CaptureError, match=r'state\["model"\]\["weight"\] was changed'):
            handle.captured(timeout=60)
        good = ckpt.save(3, loop.state)
        good.wait(timeout=60)


def test_weights_that_were_swapped_while_they_were_copied_and_back_are_found_after_the_barrier(
    make_config: MakeConfig, held: threading.Event
) -> None:
    """As for an evaluation with averaged weights: at the barrier the state is what it was at save."""
    loop = Loop()
    with tierfall.open(make_config(host={"capacity": "32MiB"})) as ckpt:
        held.set()
        begun(ckpt, loop)
        held.clear()
        handle = ckpt.save(2, loop.state)
        weight, kept = loop.model.weight.data, loop.weights()
        weight.mul_(2)
        while ckpt._capturer._current.copier.copy_next():  # type: ignore[union-attr]
            continue
        weight.copy_(kept)
        loop.update()
        held.set()
        with pytest.raises(StateChangedError) as caught:
            handle.captured(timeout=60)
        assert caught.value.tensors == ("model.weight",)
        good = ckpt.save(3, loop.state)
        before = loop.weights()
        loop.update()
        good.wait(timeout=60)
        assert torch.equal(saved_weights(ckpt, 3), before)


def test_a_barrier_that_waits_too_long_gives_up_the_snapshot_and_never_the_training(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    claimed, stuck = threading.Event(), threading.Event()
    copy = ImageCopier._copy

    def copy_late(self: ImageCopier, pieces: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            claimed.set()
            assert stuck.wait(60)
        copy(self, pieces)

    with tierfall.open(make_config(host={"capacity": "32MiB"}, max_wait="1s")) as ckpt:
        begun(ckpt, loop)
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "_copy", copy_late)
            handle = ckpt.save(2, loop.state)
            assert claimed.wait(60)  # the capture thread is inside a copy
            before = loop.weights()
            loop.update()
            assert not torch.equal(loop.weights(), before)  # training went on
            stuck.set()
            with pytest.raises(CaptureError, match="max_wait"):
                handle.captured(timeout=60)
        loop.update()
        ckpt.save(3, loop.state).wait(timeout=60)
        assert [info.step for info in ckpt.checkpoints()] == [1, 3]
