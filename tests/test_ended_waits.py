"""Waiting callers get an error if the coordinator fails, a tier hangs or the run is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, refuse_threads, state_of, step_in, steps_on, wait_until
from tierfall.core.flush.rates import TierThroughput
from tierfall.core.types.errors import (
    CapacityError,
    ConfigError,
    TierfallError,
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


# A coordinator that breaks down ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_coordinator_breaks_down_whoever_waits_is_notified(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, gate: Callable[..., Gate]
) -> None:
    held = gate("commit")
    ckpt = tierfall.open(make_config(max_wait="2s"))
    handle = ckpt.save(1, state_of(1))
    assert held.arrived.wait(PATIENCE_S)

    def broken(self: TierThroughput, *words: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(TierThroughput, "on_ended", broken)
    held.opened.set()
    with pytest.raises(TierfallError, match=r"coordinator stopped.*a defect"):
        handle.wait(timeout=PATIENCE_S)
    for call in (
        lambda: ckpt.save(2, state_of(2)),
        lambda: ckpt.restore(blank()),
        lambda: ckpt.pin(1),
        ckpt.checkpoints,
        ckpt.drain,
        ckpt.close,
    ):
        with pytest.raises(TierfallError, match=r"coordinator stopped.*a defect"):
            call()


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
