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
from tierfall.core.capture.barrier import Barrier
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.capture.lazy_evidence import LazyEvidence
from tierfall.core.capture.snapshot import Snapshot
from tierfall.core.types.errors import CaptureError, StateChangedError
from tierfall.core.types.values import CheckpointId, SaveOutcome
from tierfall.session.session import Session

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


def test_an_error_that_is_its_own_cause_fails_the_save_alone(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python permits it, and such an error must not hold training."""

    def fail(copier: ImageCopier, *words: Any) -> bool:
        error = RuntimeError("a circle")
        raise error from error

    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patched:
            patched.setattr(ImageCopier, "copy_next", fail)
            with pytest.raises(CaptureError, match="a circle"):
                ckpt.save(2, trainer.state, block=True)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("copied", [True, False])
def test_a_write_that_no_version_shows_gives_the_snapshot_up_by_name(
    make_config: MakeConfig, tmp_path: Path, held: Held, verify: str, copied: bool
) -> None:
    """Before its copy the write is in the image, and after it in the live tensor."""
    trainer = Trainer()
    config = {**make_config(), "capture": {"verify": verify}}
    with tierfall.open(config) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        if copied:
            held.free.set()
            wait_until(lambda: snapshot.hashed, "the image is complete")
            assert not handle.done("host")  # no barrier has come yet
        trainer.model[1].bias.data += 1.0
        held.free.set()
        trainer.step()
        error = failed(handle)
        assert isinstance(error, StateChangedError)
        assert 'state["model"]["1.bias"] was changed between save()' in str(error)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_without_verify_what_is_frozen_is_copied_at_once(
    make_config: MakeConfig, tmp_path: Path, held: Held
) -> None:
    trainer, frozen = Trainer(), torch.nn.Linear(20, 20).requires_grad_(False)
    trainer.state["frozen"] = frozen
    with tierfall.open({**make_config(), "capture": {"verify": "off"}}) as ckpt:
        warmed_up(ckpt, trainer)
        before = frozen.weight.clone()
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        frozen.weight.data.zero_()
        held.free.set()
        handle.wait(timeout=PATIENCE_S)
    assert torch.equal(tierfall.load(tmp_path / "disk", step=2)["frozen"]["weight"], before)


def test_an_image_for_which_no_barrier_comes_is_sealed_all_the_same(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last save of a training, or before a long evaluation."""
    monkeypatch.setattr(capturer, "SETTLED_S", 0.01)
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handle = lazy_save(ckpt, trainer, 2)
        wait_until(lambda: handle.done("disk"), "it is committed")


@pytest.mark.parametrize("counted", [True, False])
def test_an_image_for_which_no_barrier_comes_is_not_sealed_over_a_change(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    monkeypatch.setattr(capturer, "SETTLED_S", 0.2)
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handle = lazy_save(ckpt, trainer, 2)
        bias = trainer.model[1].bias
        (bias.detach() if counted else bias.data).add_(1)
        assert isinstance(failed(handle), StateChangedError)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_what_was_changed_is_copied_at_once_from_then_on(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an embedding with max_norm, which forward renormalizes."""
    trainer, wanted = Trainer(), {}
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        handles = []
        for step in range(2, 8):
            wanted[step] = trainer.now()
            handles.append(lazy_save(ckpt, trainer, step))
            with torch.no_grad():
                trainer.model[0].weight.mul_(0.99)
            trainer.step()
        assert isinstance(failed(handles[0]), StateChangedError)
        for handle in handles[1:]:
            handle.wait(timeout=PATIENCE_S)
    for step in range(3, 8):
        assert_same(saved(tmp_path / "disk", step), wanted[step])
    (warning,) = [r.getMessage() for r in caplog.records if "from now on" in r.getMessage()]
    assert "model.0.weight" in warning
    assert "wait_captured()" in warning


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


@pytest.mark.parametrize("verify", ["sample", "full", "off"])
def test_a_check_agrees_with_what_was_not_changed(
    make_config: MakeConfig, tmp_path: Path, verify: str
) -> None:
    trainer = Trainer(fused=True)
    config = {**make_config(), "capture": {"verify": verify}}
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


@pytest.mark.parametrize("hook", ["state_dict", "state_dict_pre", "optimizer"])
def test_a_hook_that_raises_is_reported_by_name_and_costs_its_own_save_alone(
    make_config: MakeConfig, tmp_path: Path, held: Held, hook: str
) -> None:
    """While the save before is still captured."""
    trainer, broken = Trainer(), []

    def raises(*words: Any) -> None:
        if broken:
            raise ValueError("the hook's own")

    if hook == "state_dict":
        trainer.model[1].register_state_dict_post_hook(raises)
    elif hook == "state_dict_pre":
        trainer.model[1].register_state_dict_pre_hook(raises)
    else:
        trainer.optimizer.register_state_dict_pre_hook(raises)
    named = "optimizer" if hook == "optimizer" else "model"
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        before = trainer.now()
        handle = lazy_save(ckpt, trainer, 2)
        broken.append(True)
        with pytest.raises(CaptureError, match=rf'\["{named}"\] cannot be saved: .* ValueError'):
            ckpt.save(3, trainer.state)
        broken.clear()
        held.free.set()
        trainer.step()
        handle.wait(timeout=PATIENCE_S)
        after = trainer.now()
        lazy_save(ckpt, trainer, 4).wait(timeout=PATIENCE_S)
    assert_same(saved(tmp_path / "disk", 2), before)
    assert_same(saved(tmp_path / "disk", 4), after)
    assert not list((tmp_path / "disk").glob("run/step-00000003-*"))


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
    [lambda t: t.optimizer.state.clear(), replace_moments, swap_weights, assign],
    ids=["cleared", "replaced", "swapped", "assigned"],
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


@pytest.mark.parametrize("by", ["zero_", "set_", "data"])
def test_moments_that_are_changed_in_place_under_capture_fail_the_save_by_name(
    make_config: MakeConfig, tmp_path: Path, held: Held, by: str
) -> None:
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        for entries in trainer.optimizer.state.values():
            moment = entries["exp_avg"]
            if by == "set_":
                moment.set_(torch.zeros_like(moment))
            else:
                (moment.data if by == "data" else moment).zero_()
        held.free.set()
        trainer.step()
        error = failed(handle)
        assert isinstance(error, StateChangedError)
        assert all(name.endswith(".exp_avg") for name in error.tensors)
        assert 'state["optimizer"]["state"][' in str(error)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


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


def test_a_barrier_that_waits_too_long_gives_the_snapshot_up_and_trains_on(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    go_on = threading.Event()
    copy = ImageCopier._copy

    def stuck(filling: ImageCopier, pieces: Any) -> None:
        if threading.current_thread().name.endswith("-capture"):
            inside.set()
            assert go_on.wait(PATIENCE_S)
        copy(filling, pieces)

    inside = threading.Event()
    with tierfall.open(make_config(max_wait="1s")) as ckpt:
        warmed_up(ckpt, trainer)
        monkeypatch.setattr(ImageCopier, "_copy", stuck)
        handle = lazy_save(ckpt, trainer, 2)
        assert inside.wait(PATIENCE_S)
        before = trainer.now()
        trainer.step()
        assert not torch.equal(before["model.0.weight"], trainer.now()["model.0.weight"])
        monkeypatch.setattr(ImageCopier, "_copy", copy)
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
    run = ImageCopier.run

    def stumble(filling: ImageCopier) -> None:
        raise error

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        monkeypatch.setattr(ImageCopier, "run", stumble)
        handle = lazy_save(ckpt, trainer, 2)
        assert failed(handle) is error
        monkeypatch.setattr(ImageCopier, "run", run)
        with pytest.raises(CaptureError) as caught:
            handle.captured()
        assert caught.value.__context__ is error
        if steps:
            trainer.step()
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_a_blocking_capture_that_fails_raises_in_save_and_the_next_one_works(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    copy = ImageCopier.copy_next

    def fail(filling: ImageCopier, *words: Any) -> bool:
        raise RuntimeError("broken")

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        lazy_save(ckpt, trainer, 10)
        ckpt.drain()
        monkeypatch.setattr(ImageCopier, "copy_next", fail)
        with pytest.raises(CaptureError, match=r"step 11: .*broken") as caught:
            ckpt.save(11, trainer.state)
        assert isinstance(caught.value.__context__, RuntimeError)
        monkeypatch.setattr(ImageCopier, "copy_next", copy)
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


# Where else it may fail ------------------------------------------------------------------------------


def memory_is_free(ckpt: tierfall.Checkpointer) -> None:
    """Nothing is left but what was sealed."""
    entries = ckpt._session.coordinator.ledger.entries

    def only_sealed() -> bool:
        held = ckpt._session.call(lambda: sum(e.region is not None for e in entries.values()))
        arena = ckpt._session.host._arena
        assert arena is not None
        return held == len(arena.regions()) == len(ckpt._session.host.images())

    wait_until(only_sealed, "the failed image's memory is given back")


def newest(ckpt: tierfall.Checkpointer) -> SaveHandle:
    return ckpt._saver.counts.handles[-1]


def test_sources_off_the_host_that_cannot_be_read_fail_the_save_and_wedge_nothing(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by the training thread, before the capture thread hears of the snapshot."""
    trainer = Trainer()
    begin = Capturer.begin

    def elsewhere(capturer: Capturer, snapshot: Snapshot, **words: Any) -> None:
        begin(capturer, snapshot, **{**words, "here": True})

    def broken(filling: ImageCopier, *words: Any) -> None:
        raise RuntimeError("the device is gone")

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(Capturer, "begin", elsewhere)
            patch.setattr(ImageCopier, "copy_next", broken)
            with pytest.raises(CaptureError, match=r"step 2: .*the device is gone"):
                ckpt.save(2, trainer.state)
        failed(newest(ckpt))
        memory_is_free(ckpt)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


@pytest.mark.parametrize("error", [MemoryError("no more"), RuntimeError("odd"), KeyboardInterrupt])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_check_that_breaks_down_fails_the_save_whole_or_not(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: Held,
    hashed: bool,
    error: BaseException,
) -> None:
    trainer = Trainer()

    def broken(filling: ImageCopier, *words: Any) -> None:
        raise error

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        if not hashed:
            held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        snapshot = ckpt._capturer._current
        assert snapshot is not None
        if hashed:
            wait_until(lambda: snapshot.hashed, "the image is complete")
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "check_state", broken)
            expected = CaptureError if isinstance(error, Exception) else KeyboardInterrupt
            with pytest.raises(expected):
                ckpt.wait_captured()
        held.free.set()
        assert "step 2" in str(failed(handle)) or isinstance(failed(handle), KeyboardInterrupt)
        memory_is_free(ckpt)
        trainer.step()
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("where", ["choose", "begin"])
def test_a_save_that_is_interrupted_after_it_was_announced_leaves_nothing(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    verify: str,
) -> None:
    trainer = Trainer()
    owner = LazyEvidence if where == "choose" else Capturer
    original = getattr(owner, where)

    def interrupted(*words: Any, **more: Any) -> None:
        if where == "begin":
            original(*words, **more)
        raise KeyboardInterrupt

    with tierfall.open({**make_config(), "capture": {"verify": verify}}) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, trainer.state)
        trainer.step()
        ckpt.drain(PATIENCE_S)
        memory_is_free(ckpt)
        assert not [c for c in ckpt.checkpoints() if c.step == 2]
        ckpt.save(3, trainer.state, block=True)


@pytest.mark.parametrize("answered", [True, False])
def test_a_save_that_is_interrupted_while_it_waits_for_memory_gives_it_back(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    trainer = Trainer()
    wait = Session.wait

    def interrupted(session: Session, done: threading.Event, *words: Any) -> bool:
        if answered:
            wait(session, done)
        raise KeyboardInterrupt

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, trainer.state)
        memory_is_free(ckpt)
        ckpt.save(2, trainer.state, block=True)  # it never was begun
        assert {c.step for c in ckpt.checkpoints()} == {1, 2}


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


def test_waiting_for_an_older_save_is_no_barrier_of_a_newer_one(
    make_config: MakeConfig, held: Held
) -> None:
    """A wait is the barrier of its own snapshot, and must not end a newer capture."""
    trainer = Trainer()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        second = lazy_save(ckpt, trainer, 2)
        trainer.step()
        second.wait(timeout=PATIENCE_S)
        held.hold()
        lazy_save(ckpt, trainer, 3)
        filling = ckpt._capturer._current
        second.wait(timeout=PATIENCE_S)
        assert ckpt._capturer._current is filling
        assert filling is not None
        assert not filling.copier.copied
        held.free.set()


def test_what_cannot_be_copied_at_once_fails_the_save_and_gives_its_memory_back(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()

    def broken(filling: ImageCopier, pieces: Any) -> None:
        raise RuntimeError("no more")

    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "_copy", broken)
            with pytest.raises(CaptureError, match=r"step 2: .*no more"):
                ckpt.save(2, trainer.state)
        memory_is_free(ckpt)
        still_saves(ckpt, trainer, 3, tmp_path / "disk")


def test_a_save_that_had_begun_before_a_failure_was_known_is_no_second_failure() -> None:
    """The two of a row are counted from what was done about the first."""
    barrier = Barrier(lambda: None, recorded=lambda: None)
    evidence = LazyEvidence(barrier, checked=True)
    barrier.on_explicit_wait()

    def fails(step: int) -> str | None:
        evidence.on_failed(CheckpointId(step, 1), StateChangedError("changed", ("w",)))
        return evidence.reason_to_block(elsewhere=(), first=False)

    try:
        for step in (1, 2):
            evidence.on_begun(CheckpointId(step, 1))
        assert fails(1) is None
        assert fails(2) is None
        assert fails(2) is None  # the thread at the barrier says it, and the capture thread too
        evidence.on_begun(CheckpointId(3, 1))
        output = fails(3)
        assert "2 saves in a row" in str(output)
        evidence.on_failed(CheckpointId(4, 1), StateChangedError("changed", ("other",)))
        assert evidence.reason_to_block(elsewhere=(), first=False) == output, (
            "said once, in one way"
        )
    finally:
        barrier.close()
