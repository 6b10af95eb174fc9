"""Waiting callers get an error if a tier hangs or fails, a thread cannot be started, Ctrl-C comes, or the run is
closed."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.capture.lazy_help import Held, Trainer, lazy_save, warmed_up
from tests.media import Medium
from tests.steps import blank, refuse_threads, state_of, step_in, steps_on, wait_until
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.types.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    FlushError,
    UnreachableError,
)
from tierfall.tiers.run_files import DecidedFolder
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
PATIENCE_S = 20.0


class Gate:
    """Holds calls of one method of a tier, or of its list, until it is opened."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: str, *, of: type = StoredTier
    ) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        original = getattr(of, method)

        def held(*words: Any, **more: Any) -> Any:
            self.arrived.set()
            assert self.opened.wait(PATIENCE_S)
            return original(*words, **more)

        monkeypatch.setattr(of, method, held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gate]]:
    gates: list[Gate] = []

    def make(method: str, **words: Any) -> Gate:
        gates.append(Gate(monkeypatch, method, **words))
        return gates[-1]

    yield make
    for one in gates:
        one.opened.set()


# A person's orders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["pin", "delete"])
def test_an_order_never_holds_the_training_up_for_longer_than_max_wait(
    make_config: MakeConfig, tmp_path: Path, gate: Callable[..., Gate], order: str
) -> None:
    held = gate("add", of=DecidedFolder)
    with tierfall.open(make_config(max_wait="0.5s")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        with pytest.raises(UnreachableError, match=rf"{order} of 1@1: tier disk .*\(max_wait\)"):
            getattr(ckpt, order)(1)
        held.opened.set()
        ckpt.drain()
        if order == "delete":
            assert steps_on(tmp_path / "disk") == [2]
        else:
            assert [c.pinned for c in ckpt.checkpoints()] == [True, False]


# Opening ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["disk-1", "status"])
def test_a_thread_that_cannot_be_started_leaves_nothing_open(
    name: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with monkeypatch.context() as patch:
        refuse_threads(patch, f"tierfall-run-{name}")
        with pytest.raises(CapacityError, match=r"open: .* another thread.*ulimit -u"):
            tierfall.open(make_config())
    wait_until(
        lambda: {t.name for t in threading.enumerate()} <= before | {"tierfall-call"}, "all end"
    )
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)


@pytest.mark.parametrize("started", [0, 1])
def test_a_restore_reads_by_the_threads_that_there_are(
    started: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    state = blank()
    with tierfall.open(make_config()) as ckpt, monkeypatch.context() as patch:
        refuse_threads(patch, "tierfall-work", after=started)
        assert ckpt.restore(state) is not None
    assert step_in(state) == 1


# Closing ---------------------------------------------------------------------------------------------


def test_a_second_one_with_other_memory_is_refused_too(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its lock lies elsewhere; it would fence the first."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(ConfigError, match="a second Checkpointer of run 'run'"):
            tierfall.open(make_config(host={"folder": str(other)}))
        ckpt.save(1, state_of(1), block=True)


@pytest.mark.usefixtures("impatient")
def test_on_error_raise_reaches_a_loop_that_saves_no_more(
    make_config: MakeConfig, tmp_path: Path, slow_medium: Medium
) -> None:
    config = make_config(disk={}, slow={}, max_wait="0.3s", on_error="raise")
    ckpt = tierfall.open(config)
    slow_medium.fail("fsync", errno.EIO, times=10**9)
    handle = ckpt.save(1, state_of(1))
    wait_until(lambda: handle.exception() is not None, "it is reported")
    with pytest.raises(FlushError, match="flush of 1@1 to slow"):
        ckpt.close()
    assert steps_on(tmp_path / "disk") == [1]


def test_a_copy_that_never_fits_keeps_no_close_waiting(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    ckpt = tierfall.open(make_config(max_wait="60s", disk={}, small={"capacity": "400KiB"}))
    ckpt.save(1, state_of(1), block=True)
    ckpt.save(2, state_of(2, elements=200_000)).wait("disk")
    began = time.monotonic()
    ckpt.close()
    assert time.monotonic() - began < 30
    assert steps_on(tmp_path / "small") == [1]


def test_an_interrupt_at_the_barrier_goes_through_and_its_image_is_never_sealed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(copier: ImageCopier, *words: Any, **more: Any) -> bool:
        raise KeyboardInterrupt

    trainer, held = Trainer(), Held(monkeypatch)
    held.free.set()
    with tierfall.open(make_config()) as ckpt:
        warmed_up(ckpt, trainer)
        held.hold()
        handle = lazy_save(ckpt, trainer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(ImageCopier, "copy_next", interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.step()
            held.free.set()
            with pytest.raises(CaptureError, match="interrupted"):
                handle.captured(timeout=PATIENCE_S)
        assert [info.step for info in ckpt.checkpoints()] == [1]
        trainer.step()
        ckpt.save(3, trainer.state, block=True)
        assert [info.step for info in ckpt.checkpoints()] == [1, 3]
