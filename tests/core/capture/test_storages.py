"""Storages that a loop frees while they are captured: the call waits for the capture, as a step does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch._subclasses import FakeTensorMode

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
from tierfall.core.capture import barrier
from tierfall.core.capture.barrier import METHODS
from tierfall.core.image import sources
from tierfall.core.runtime.memory_copies import MemoryCopies
from tierfall.core.types.errors import StateChangedError
from tierfall.core.types.values import SaveOutcome

pytestmark = pytest.mark.usefixtures("small_segments")


def methods() -> dict[str, Any]:
    return {name: torch.UntypedStorage.__dict__.get(name) for name in METHODS}


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, torch is as it was afterwards. A run that a test elsewhere left open is put aside."""
    for name, (original, _) in barrier._wrapped.items():
        if original is None:
            monkeypatch.delattr(torch.UntypedStorage, name)
        else:
            monkeypatch.setattr(torch.UntypedStorage, name, original)
    monkeypatch.setattr(barrier, "_watches", [])
    monkeypatch.setattr(barrier, "_wrapped", {})
    before = methods()
    yield
    assert methods() == before


def is_copied(ckpt: tierfall.Checkpointer) -> bool:
    """Say whether nothing of the save under way is left to be read."""
    snapshot = ckpt._capturer._current
    return snapshot is None or snapshot.copier.copied


def free(trainer: Trainer) -> Callable[[], None]:
    """As offloading does it: the memory goes, and comes back with the same values."""
    parameters = [*trainer.model.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)

    def back() -> None:
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.untyped_storage().resize_(values.nbytes)
            parameter.data.copy_(values)

    return back


def share(trainer: Trainer) -> None:
    trainer.model.share_memory()


def send(trainer: Trainer) -> None:
    context = torch.multiprocessing.get_context("fork")
    ear, mouth = context.Pipe()
    weight = trainer.model[0].weight.detach()  # type: ignore[operator]
    mouth.send(weight)
    assert torch.equal(ear.recv(), weight)


def in_a_thread(trainer: Trainer) -> None:
    thread = threading.Thread(target=share, args=(trainer,))
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


WAYS: list[Callable[[Trainer], Any]] = [
    free,
    send,
    in_a_thread,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_freed_under_capture_is_copied_first(
    make_config: MakeConfig, tmp_path: Path, held: Held, way: Callable[[Trainer], Any]
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        assert not is_copied(ckpt)
        back = way(trainer)
        assert is_copied(ckpt), "the capture thread stands still: the caller has copied all"
        if back is not None:
            back()
        held.free.set()
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
        after = trainer.now()
        lazy_save(ckpt, trainer, 3)
    assert_same(saved(tmp_path / "disk", 2), before)
    assert_same(saved(tmp_path / "disk", 3), after)


def test_memory_whose_tensor_gets_another_one_is_read_to_its_end(
    make_config: MakeConfig, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``.data`` of moments is replaced, which frees what they had, in the middle of the call that copies them."""
    trainer = Trainer()
    copy, read = sources.copy_on_host, []

    def replace_meanwhile(copies: MemoryCopies) -> None:
        places = [*zip(copies.sources.tolist(), copies.sizes.tolist(), strict=True)]
        before = [ctypes.string_at(*place) for place in places]
        for moments in trainer.optimizer.state.values():
            tensor, size = moments["exp_avg"], moments["exp_avg"].numel()
            if tensor.data_ptr() in copies.sources.tolist():
                tensor.data = torch.zeros(1)
                read.append(torch.full((size,), 7.0))  # takes the memory, if it is free
        assert [ctypes.string_at(*place) for place in places] == before, "it was freed"
        copy(copies)

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(sources, "copy_on_host", replace_meanwhile)
            held.free.set()
            wait_until(lambda: handle.outcome is not SaveOutcome.PENDING, "the save ends")
        assert read
        with pytest.raises(StateChangedError, match="exp_avg"):
            handle.captured(timeout=PATIENCE_S)


def test_torch_has_its_own_methods_when_no_run_is_open(make_config: MakeConfig) -> None:
    before = methods()
    with tierfall.open(make_config()):
        assert methods() != before
    assert methods() == before
    with pytest.raises(ZeroDivisionError), tierfall.open(make_config(), fresh=True):
        raise ZeroDivisionError
    assert methods() == before


def test_a_storage_without_memory_may_be_freed(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()), FakeTensorMode():
        torch.zeros(100).untyped_storage().resize_(0)
        torch.zeros(100, device="meta").untyped_storage().resize_(0)
