"""Storages that a loop frees while they are captured: the call waits for the capture, as a step does."""

from __future__ import annotations

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
from tierfall.core.capture import storage_watch
from tierfall.core.capture.storage_watch import METHODS
from tierfall.core.types.errors import StateChangedError
from tierfall.core.types.values import SaveOutcome
from tierfall.run.checkpointer import open_run_of

pytestmark = pytest.mark.usefixtures("small_segments")


def methods() -> dict[str, Any]:
    return {name: torch.UntypedStorage.__dict__.get(name) for name in METHODS}


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, torch is as it was afterwards. A run that a test elsewhere left open is put aside."""
    for name, (original, _) in storage_watch._wrapped.items():
        if original is None:
            monkeypatch.delattr(torch.UntypedStorage, name)
        else:
            monkeypatch.setattr(torch.UntypedStorage, name, original)
    monkeypatch.setattr(storage_watch, "_watches", [])
    monkeypatch.setattr(storage_watch, "_wrapped", {})
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


def share_moments(trainer: Trainer) -> None:
    for entries in trainer.optimizer.state.values():
        entries["exp_avg"].share_memory_()


def send(trainer: Trainer) -> None:
    context = torch.multiprocessing.get_context("fork")
    ear, mouth = context.Pipe()
    weight = trainer.model[0].weight.detach()  # type: ignore[operator]
    mouth.send(weight)
    assert torch.equal(ear.recv(), weight)


def send_by_name(trainer: Trainer) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        send(trainer)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def in_a_thread(trainer: Trainer) -> None:
    thread = threading.Thread(target=share, args=(trainer,))
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


WAYS: list[Callable[[Trainer], Any]] = [
    free,
    share,
    share_moments,
    send,
    send_by_name,
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
    copy, read = torch._foreach_copy_, []

    def replace_meanwhile(to: Any, of: list[torch.Tensor], **words: Any) -> None:
        before = [source.data_ptr() for source in of]
        for moments in trainer.optimizer.state.values():
            moments["exp_avg"].data = torch.zeros(1)
        assert [source.data_ptr() for source in of] == before, "the copy would read freed memory"
        read.append(len(of))
        copy(to, of, **words)

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", replace_meanwhile)
            held.free.set()
            wait_until(lambda: handle.outcome is not SaveOutcome.PENDING, "the save ends")
        assert read
        with pytest.raises(StateChangedError, match="exp_avg"):
            handle.captured(timeout=PATIENCE_S)


def test_storages_that_are_not_captured_wait_for_nothing(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer, other = Trainer(), torch.ones(1000)
    gradients = [torch.ones(10), torch.ones(0)]
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        before = trainer.now()
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        other.untyped_storage().resize_(0)
        for gradient in gradients:
            gradient.share_memory_()
        assert not is_copied(ckpt)
        held.free.set()
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)


def test_of_two_runs_that_are_open_each_waits_for_its_own(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainers = Trainer(), Trainer()
    first, second = (
        {
            **make_config(**{disk: {}}, host={"folder": str(tmp_path / f"memory-{disk}")}),
            "run": disk,
        }
        for disk in ("one", "two")
    )
    with tierfall.open(first) as one:
        with tierfall.open(second) as two:
            warmed_up(one, trainers[0])
            warmed_up(two, trainers[1])
            before = trainers[0].now(), trainers[1].now()
            held.hold()
            handles = lazy_save(one, trainers[0], 2), lazy_save(two, trainers[1], 2)
            free(trainers[1])()
            assert is_copied(two)
            assert not is_copied(one)
            free(trainers[0])()
            assert is_copied(one)
            held.free.set()
            for handle in handles:
                handle.wait(timeout=PATIENCE_S)
        trainers[0].step()
        third = trainers[0].now()
        held.hold()
        handle = lazy_save(one, trainers[0], 3)
        free(trainers[0])()
        assert is_copied(one), "the other run is closed, and this one is not"
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert_same(found(tmp_path, "one", 2), before[0])
    assert_same(found(tmp_path, "two", 2), before[1])
    assert_same(found(tmp_path, "one", 3), third)


def found(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    return saved(folder / run / run, step)


def test_torch_has_its_own_methods_when_no_run_is_open(make_config: MakeConfig) -> None:
    before = methods()
    with tierfall.open(make_config()):
        assert methods() != before
    assert methods() == before
    with pytest.raises(ZeroDivisionError), tierfall.open(make_config(), fresh=True):
        raise ZeroDivisionError
    assert methods() == before


def test_what_others_put_in_the_place_of_a_method_stays_and_is_called(
    make_config: MakeConfig, held: Held
) -> None:
    """A memory profiler, say, that came later than the run, and sees the next one too."""
    trainer, called = Trainer(), []
    try:
        with tierfall.open(make_config()) as ckpt:
            warmed_up(ckpt, trainer)
            inner = torch.UntypedStorage.resize_

            def counted(storage: torch.UntypedStorage, *words: Any) -> Any:
                called.append(words)
                return inner(storage, *words)

            torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
            held.hold()
            handle = lazy_save(ckpt, trainer, 2)
            free(trainer)()
            assert is_copied(ckpt)
            held.free.set()
            handle.wait(timeout=PATIENCE_S)
        assert torch.UntypedStorage.resize_ is counted
        seen = len(called)
        assert seen == 2 * len([*trainer.model.parameters()])
        torch.ones(10).untyped_storage().resize_(0)
        with tierfall.open(make_config(), fresh=True):
            torch.ones(10).untyped_storage().resize_(0)
        torch.ones(10).untyped_storage().resize_(0)
        assert len(called) == seen + 3
        assert torch.UntypedStorage.resize_ is counted
    finally:
        del torch.UntypedStorage.resize_


def test_storages_of_a_class_of_ones_own_are_freed_as_they_say(make_config: MakeConfig) -> None:
    class Counted(torch.UntypedStorage):
        calls = 0

        def resize_(self, size: int) -> Any:
            Counted.calls += 1
            return super().resize_(size)

    with tierfall.open(make_config()):
        storage = Counted(16)
        storage.resize_(0)
    assert (Counted.calls, storage.nbytes()) == (1, 0)


def test_a_change_that_came_before_fails_the_save_and_the_storage_is_freed_all_the_same(
    make_config: MakeConfig, held: Held
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        trainer.model[0].weight.data.add_(1)  # type: ignore[operator]
        free(trainer)()
        held.free.set()
        with pytest.raises(tierfall.errors.CaptureError, match=r"0\.weight.* was changed"):
            handle.captured(timeout=PATIENCE_S)
        trainer.step()
        ckpt.save(3, trainer.state, block=True)


def test_a_storage_without_memory_may_be_freed(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()), FakeTensorMode():
        torch.zeros(100).untyped_storage().resize_(0)
        torch.zeros(100, device="meta").untyped_storage().resize_(0)


def test_torch_is_as_it_was_after_a_close_that_was_interrupted(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = methods()
    ckpt = tierfall.open(make_config())
    assert methods() != before

    def interrupted(timeout_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(open_run_of(ckpt), "finish_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    assert methods() == before
