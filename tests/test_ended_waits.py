"""Waiting callers get an error if the coordinator fails, a tier hangs or the run is closed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests import forked
from tests.steps import blank, refuse_threads, state_of, step_in, steps_on, wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.capture.capturer import Capturer
from tierfall.core.capture.copier import ImageCopier
from tierfall.core.copies import shard_reader as restoring
from tierfall.core.scheduler.ledger.throughput import TierThroughput
from tierfall.core.types.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigError,
    FlushError,
    StepError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.session.session import Session
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
PATIENCE_S = 20.0


class Gate:
    """Holds calls of one method of a tier until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, *, shut: bool = True) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        if not shut:
            self.opened.set()
        original = getattr(StoredTier, method)

        def held(*words: Any, **more: Any) -> Any:
            self.arrived.set()
            assert self.opened.wait(PATIENCE_S)
            return original(*words, **more)

        monkeypatch.setattr(StoredTier, method, held)


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


def test_what_is_still_owed_at_the_end_is_reported_to_whoever_waits(
    make_config: MakeConfig, tmp_path: Path, gate: Callable[..., Gate]
) -> None:
    held = gate("create_shard")
    ckpt = tierfall.open(make_config(max_wait="1s"))
    handle = ckpt.save(1, state_of(1))
    handle.captured(PATIENCE_S)
    assert held.arrived.wait(PATIENCE_S)
    ckpt.close()
    with pytest.raises(FlushError, match="is in host memory, and the next start"):
        handle.wait(timeout=0)
    held.opened.set()
    with tierfall.open(make_config()) as ckpt:
        ckpt.drain()
    assert steps_on(tmp_path / "disk") == [1]


# A person's orders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["pin", "delete"])
def test_an_order_never_holds_the_training_up_for_longer_than_max_wait(
    make_config: MakeConfig, tmp_path: Path, gate: Callable[..., Gate], order: str
) -> None:
    held = gate("add_mark")
    with tierfall.open(make_config(max_wait="1s")) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        with pytest.raises(
            UnreachableError, match=rf"{order} of 1@1: tier disk .*1 s \(max_wait\)"
        ):
            getattr(ckpt, order)(1)
        held.opened.set()
        ckpt.drain()
        if order == "delete":
            assert steps_on(tmp_path / "disk") == [2]
        else:
            assert [c.pinned for c in ckpt.checkpoints()] == [True, False]


def test_an_order_that_waits_for_a_reader_says_so(
    make_config: MakeConfig, tmp_path: Path, gate: Callable[..., Gate]
) -> None:
    held = gate("commit")
    with tierfall.open(make_config(max_wait="1s")) as ckpt:
        ckpt.save(1, state_of(1))
        assert held.arrived.wait(PATIENCE_S)
        with pytest.raises(TierfallError, match=r"delete of 1@1: .*still being read, written"):
            ckpt.delete(1, even_the_last=True)
        held.opened.set()
        ckpt.drain()
        assert steps_on(tmp_path / "disk") == []


@pytest.mark.parametrize("call", ["restore", "pin", "unpin", "delete"])
@pytest.mark.parametrize("word", ["1", 1.0, True])
def test_a_step_that_is_no_integer_is_refused(
    make_config: MakeConfig, call: str, word: object
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ask = getattr(ckpt, call)
        words = (blank(),) if call == "restore" else ()
        with pytest.raises(StepError, match=f"{call}: step must be an integer"):
            ask(*words, step=word)
        with pytest.raises(StepError, match=f"{call}: attempt must be an integer"):
            ask(*words, step=1, attempt=word)


def test_maybe_save_says_at_once_that_a_restore_is_missing(make_config: MakeConfig) -> None:
    config = {**make_config(), "interval": {"every": 100}}
    with tierfall.open(config) as ckpt:
        ckpt.save(100, state_of(100), block=True)
    with tierfall.open(config) as ckpt, pytest.raises(StepError, match="restored none"):
        ckpt.maybe_save(1, state_of(1))


# Going back ------------------------------------------------------------------------------------------


def test_a_restore_after_saves_never_fences_its_own_process(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt's record lies on the tier before the process goes on as that attempt; a commit may come between."""
    take = StoredTier.create_attempt

    def slowly(tier: StoredTier, attempt: Any) -> None:
        take(tier, attempt)
        session = ckpt._session
        if session.attempt is not None and session.attempt.number < attempt.number:
            held.opened.set()
            wait_until(
                lambda: bool(list(tmp_path.glob("disk/run/step-00000002-a0001/commit.json"))),
                "the copy of the line before is committed",
            )

    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        held = Gate(monkeypatch, "commit")
        ckpt.save(2, state_of(2))
        assert held.arrived.wait(PATIENCE_S)
        monkeypatch.setattr(StoredTier, "create_attempt", slowly)
        assert ckpt.restore(blank(), step=1) is not None
        ckpt.save(2, state_of(2), block=True)
        assert ckpt._session.coordinator.fenced is None


def test_what_is_left_behind_is_reported(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.pin(3)
    caplog.clear()
    with tierfall.open(make_config()) as ckpt:
        ckpt.restore(blank())
        assert "abandons" not in caplog.text
        ckpt.restore(blank(), step=1)
        assert "the lineage that begins at 1@1 abandons 2@1; each tier deletes" in caplog.text
    caplog.clear()
    with tierfall.open(make_config(), fresh=True):
        assert "the lineage that begins anew abandons 1@1, 2@1; each tier" in caplog.text


# Restoring -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("no more"), KeyboardInterrupt()])
def test_a_restore_that_is_cut_short_says_that_the_state_is_half_filled(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def cut_short(*words: Any) -> None:
        raise error

    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        with monkeypatch.context() as patch:
            patch.setattr(restoring, "read_fills", cut_short)
            with pytest.raises((tierfall.errors.RestoreError, KeyboardInterrupt)) as caught:
                ckpt.restore(blank())
        output = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
        assert "HALF FILLED" in output
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 1


def test_an_image_that_left_memory_while_it_was_to_be_read_comes_from_the_next_tier(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        list_now = Session.list_now

        def list_and_evict(session: Session) -> Any:
            listings = list_now(session)
            entry = session.coordinator.ledger.entries[CheckpointId(1, 1)]
            session.call(lambda: session.coordinator._admissions.free(entry))
            return listings

        monkeypatch.setattr(Session, "list_now", list_and_evict)
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert step_in(state) == 1
        assert [source.tier for source in report.sources] == ["disk"]
        assert any("left memory" in str(f.reason) for f in report.fallbacks)


# Opening ---------------------------------------------------------------------------------------------


def test_an_opening_that_fails_late_leaves_nothing_open(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = StoredTier.close

    def note(tier: StoredTier) -> None:
        closed.append(tier.name)
        close(tier)

    monkeypatch.setattr(StoredTier, "close", note)
    opened = PosixBackend.__init__

    def refuse(backend: PosixBackend, root: Path, **words: Any) -> None:
        if root.name == "far":
            raise AccessDeniedError("not for you")
        opened(backend, root, **words)

    config = make_config(disk={}, far={})
    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "__init__", refuse)
        with pytest.raises(AccessDeniedError, match="tier far: not for you"):
            tierfall.open(config)
    assert closed == ["disk"]

    def no_thread(*words: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = {thread.name for thread in threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(Capturer, "__init__", no_thread)
        with pytest.raises(CapacityError, match=r"open: .* another thread.*ulimit -u"):
            tierfall.open(config)
    assert {t.name for t in threading.enumerate()} <= before | {"tierfall-call"}
    with tierfall.open(config) as ckpt:  # the lock is free, and all is well
        ckpt.save(1, state_of(1), block=True)


@pytest.mark.parametrize("name", ["disk-1", "status", "memory"])
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


def test_an_interrupt_while_threads_end_leaves_the_run_free(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = tierfall.open(make_config())
    ckpt.save(1, state_of(1), block=True)
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("tierfall-run-disk"):
            monkeypatch.setattr(threading.Thread, "join", join)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    with tierfall.open(make_config()) as ckpt:
        assert ckpt.restore(blank()) is not None
    assert steps_on(tmp_path / "disk") == [1]


def test_closing_leaves_the_reason_of_a_failure_as_it_was(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tier: StoredTier, *words: Any) -> None:
        raise AccessDeniedError("not for you")

    monkeypatch.setattr(StoredTier, "create_shard", refuse)
    ckpt = tierfall.open(make_config(max_wait="5s"))
    handle = ckpt.save(1, state_of(1))
    with pytest.raises(FlushError, match="not for you") as before:
        handle.wait(timeout=PATIENCE_S)
    ckpt.close()
    with pytest.raises(FlushError, match="not for you") as after:
        handle.wait(timeout=0)
    for caught in (before, after):
        cause = caught.value.__context__
        assert cause is not None
        assert isinstance(cause.__cause__, AccessDeniedError)


def test_an_interrupt_is_not_its_own_cause(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: Any) -> None:
        raise KeyboardInterrupt

    with tierfall.open(make_config()) as ckpt:
        for name in ("_copy", "copy_next"):
            with monkeypatch.context() as patch:
                patch.setattr(ImageCopier, name, interrupted)
                with pytest.raises(KeyboardInterrupt) as caught:
                    ckpt.save(1 if name == "_copy" else 2, state_of(1))
                assert caught.value.__cause__ is None


def test_who_asks_for_a_short_while_waits_no_longer_and_gives_nothing_up(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under verify a wait on the handle helps the capture to its end: for as long as the asker has."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()

    answered = threading.Event()

    def ask() -> None:
        with pytest.raises(TimeoutError):
            handle.captured(timeout=0.1)
        answered.set()

    config = {**make_config(max_wait="90s"), "capture": {"verify": True}}
    with tierfall.open(config) as ckpt:
        step()
        ckpt.save(1, {"model": model}, block=True)
        step()
        handle = ckpt.save(2, {"model": model})
        with ckpt._capturer._waiting:  # the training thread is at its barrier, and takes long
            asker = threading.Thread(target=ask)
            asker.start()
            assert answered.wait(PATIENCE_S), "it waits for max_wait, not for its own time"
        asker.join()
        handle.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_a_script_that_ends_without_close_loses_nothing(
    make_config: MakeConfig, tmp_path: Path, how: str
) -> None:
    script = (
        "import sys, json, tierfall\n"
        "from tests.steps import state_of\n"
        "ckpt = tierfall.open(json.loads(sys.argv[1]))\n"
        "ckpt.save(1, state_of(1))\n"
    ) + ("1 / 0\n" if how == "raises" else "")
    done = forked.run(["-c", script, json.dumps(make_config())], timeout=120)
    assert done.returncode == (how == "raises")
    assert "run run: the program ends and did not close it: closing" in done.stderr
    assert steps_on(tmp_path / "disk") == [1]


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


@pytest.mark.parametrize("value", ["30s", -1, True, float("nan")])
def test_a_span_of_time_that_is_none_is_refused(make_config: MakeConfig, value: Any) -> None:
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state_of(1), block=True)
        for call in (ckpt.drain, ckpt.wait_captured, handle.captured):
            with pytest.raises(ConfigError, match="must be a number of seconds"):
                call(value)


def test_close_says_where_what_is_owed_lies(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(make_config(disk={}, max_wait="1s")) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    config = make_config(fast={}, disk={}, max_wait="1s")

    def refuse(tier: StoredTier, *words: Any) -> None:
        raise UnreachableError("not now")

    monkeypatch.setattr(StoredTier, "create_shard", refuse)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
    assert (
        "still owed: 1@1 to fast; the next start copies it from the tier that has it" in caplog.text
    )
    assert "drain" not in caplog.text
