"""Several ranks save the same steps by a cadence that rank 0 decides, even if they are at different steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all, restore_all
from tests.steps import state_of, wait_until
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import ConfigError, RanksError
from tierfall.core.types.values import CopyState, SaveOutcome
from tierfall.run import announced_steps
from tierfall.run.announced_steps import AnnouncedSteps
from tierfall.run.checkpointer import Checkpointer
from tierfall.setup.signal_hub import SignalWatch

STEP_S = 0.004


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between threads take no second."""
    monkeypatch.setattr(announced_steps, "AHEAD_S", 0.2)


class Training:
    """All ranks train in step with each other, as those of a real job do: each waits for all at every step."""

    def __init__(self, both: list[Checkpointer], *, last: int) -> None:
        self.both = both
        self.last = last
        self.saved: list[dict[int, SaveHandle]] = [{} for _ in both]
        self.meeting = threading.Barrier(len(both), timeout=SOON_S)
        self.before_step: dict[tuple[int, int], Callable[[], object]] = {}

    def run(self, first: int = 1) -> None:
        def train(rank: int) -> None:
            pause = threading.Event()
            for step in range(first, self.last + 1):
                pause.wait(STEP_S)
                self.meeting.wait()
                self.before_step.get((rank, step), _nothing)()
                handle = self.both[rank].maybe_save(step, state_of(step))
                if handle is not None:
                    self.saved[rank][step] = handle

        assert on_all([lambda r=r: train(r) for r in range(len(self.both))]) == [None] * len(  # type: ignore[misc]
            self.both
        )


def _nothing() -> None:
    """Nothing happens before this step."""


def committed(opener: Opener) -> list[list[int]]:
    """The steps that each rank's node has a commit record of."""
    return [
        sorted(
            int(p.parent.name.split("-")[1])
            for p in opener.folder.glob(f"{rank}/far/run/step-*/commit.json")
        )
        for rank in range(len(opener.ranks))
    ]


@pytest.mark.parametrize("interval", [{"overhead": "20%"}, {"every": "120ms"}, {"mtbf": "1s"}])
def test_all_ranks_save_the_steps_that_rank_0_chose(
    opener: Opener, interval: dict[str, Any]
) -> None:
    both = opener.all_open(interval={**interval, "at_end": False})
    training = Training(both, last=400)
    training.run()
    mine, others = training.saved
    assert len(mine) >= 3
    assert list(mine) == list(others)
    for handle in (*mine.values(), *others.values()):
        handle.wait("far", timeout=SOON_S)
    reports = [ckpt.statistics().cadence for ckpt in both]
    assert reports[1] is not None
    assert reports[1].reason == "rank 0 decides"
    close_all(both)
    assert committed(opener) == [list(mine)] * 2


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)])
def test_a_signal_to_any_rank_saves_one_step_of_all(
    opener: Opener, signalled: tuple[int, ...]
) -> None:
    both = opener.all_open(interval={"every": 10**6, "at_end": False})
    training = Training(both, last=160)
    for rank in signalled:
        training.before_step[rank, 10] = lambda r=rank: both[r]._cadence.request("SIGTERM")  # type: ignore[misc]
    training.run()
    mine, others = training.saved
    assert len(mine) == 1
    assert list(mine) == list(others)
    assert next(iter(mine)) > 10
    close_all(both)
    assert committed(opener) == [list(mine)] * 2


def test_a_rank_that_receives_too_late_gives_the_step_up_for_all_at_once_and_receives_earlier_from_then_on(
    opener: Opener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is always 30 steps ahead of rank 0: what rank 0 announces it has passed, the first time."""
    monkeypatch.setattr(announced_steps, "AHEAD_S", 0.0)
    both = opener.all_open(interval={"every": 10**6, "at_end": False})
    received = both[1]._cadence._others
    assert received is not None
    for step in range(1, 31):
        assert both[1].maybe_save(step, state_of(step)) is None
    saved: list[dict[int, SaveHandle]] = [{}, {}]
    for step in range(1, 120):
        if step in (2, 40):
            both[0]._cadence.request("SIGTERM")
        for rank, at in ((0, step), (1, step + 30)):
            if rank == 1 and step in (2, 40):
                wait_until(lambda: len(received._messages) > 0, "rank 1 has heard")
            handle = both[rank].maybe_save(at, state_of(at))
            if handle is not None:
                saved[rank][at] = handle
    first, second = saved[0].values()
    wait_until(lambda: first.exception() is not None, "it is given up", timeout_s=SOON_S / 2)
    assert first.outcome is SaveOutcome.FAILED
    assert f"save of step {first.step}: rank 1 received its announcement" in str(first.exception())
    assert "rank 1 is ahead of rank 0, and received the announcement of a save" in caplog.text
    assert list(saved[1]) == [second.step], "it was announced early enough"
    for handle in (second, saved[1][second.step]):
        handle.wait("far", timeout=SOON_S)
    close_all(both)
    assert committed(opener) == [[second.step]] * 2


def test_a_step_that_a_rank_saved_anyway_is_not_given_up_for_hearing_late(opener: Opener) -> None:
    both = opener.all_open(interval={"every": 20, "at_end": False})
    received = both[1]._cadence._others
    assert received is not None
    for step in range(1, 31):
        both[1].maybe_save(step, state_of(step))
    both[0].maybe_save(19, state_of(19))
    both[0]._cadence._add(20)
    wait_until(lambda: len(received._messages) > 0, "rank 1 has heard")
    handle = both[0].maybe_save(20, state_of(20))
    assert handle is not None
    both[1].maybe_save(31, state_of(31))
    handle.wait("far", timeout=SOON_S)
    close_all(both)
    assert committed(opener) == [[20]] * 2


def test_a_rank_that_never_receives_saves_nothing_alone_and_nobody_hangs(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = opener.all_open(interval={"every": 10**6, "at_end": False}, max_wait="1s")
    monkeypatch.setattr(both[1]._cadence._others, "_messages", _Deaf())
    training = Training(both, last=160)
    training.before_step[0, 10] = lambda: both[0]._cadence.request("SIGTERM")
    training.run()
    assert not training.saved[1]
    (handle,) = training.saved[0].values()
    wait_until(lambda: handle.exception() is not None, "it is given up", timeout_s=SOON_S)
    assert "did not save step" in str(handle.exception())
    # A save before this news comes would be given up too, since the ranks count differently.
    ledger = both[1]._session.coordinator.ledger
    wait_until(lambda: ledger.least_ordinal == 1, "rank 1 hears of it", timeout_s=SOON_S)
    both[0].save(100, state_of(100))
    both[1].save(100, state_of(100)).wait("far", timeout=SOON_S)
    close_all(both)
    assert committed(opener) == [[100]] * 2


class _Deaf:
    """A queue that loses what is put into it."""

    def append(self, news: object) -> None:
        """It is lost."""

    def __bool__(self) -> bool:
        return False


def test_what_was_announced_before_a_restore_is_not_saved_after_it(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnnouncedSteps, "lead_steps", lambda self, pace_s: 50)
    both = opener.all_open(interval={"every": 10**6, "at_end": False})
    for ckpt in both:
        ckpt.save(1, state_of(1))
    wait_until(
        lambda: all(c.checkpoints()[-1].tiers.get("far") == CopyState.COMMITTED for c in both),
        "both have it",
    )
    for ckpt in both:
        ckpt.maybe_save(2, state_of(2))
    both[0]._cadence.request("SIGTERM")
    for step in (3, 4):
        assert both[0].maybe_save(step, state_of(step)) is None
    assert both[0]._cadence.report().next_step == 53
    received = both[1]._cadence._others
    assert received is not None
    wait_until(lambda: len(received._messages) > 0, "it was announced")
    restore_all(both, [state_of(-1) for _ in both])
    for step in range(2, 120):
        for ckpt in both:
            assert ckpt.maybe_save(step, state_of(step)) is None
    close_all(both)


def test_a_rank_that_may_not_set_signals_keeps_all_from_opening(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SignalWatch.__init__

    def watch(self: SignalWatch, names: Any, asked: Any) -> None:
        real(self, ["SIGUSR1"] if asked.__self__._others.decides else [], asked)

    monkeypatch.setattr(SignalWatch, "__init__", watch)  # rank 0 alone, and in no main thread
    found = opener.all_open()
    assert [type(one) for one in found] == [ConfigError, RanksError]
    assert all("only the main thread" in str(one) for one in found)


# The last step -----------------------------------------------------------------------------------


def test_the_last_step_of_all_ranks_is_saved_at_the_end(opener: Opener) -> None:
    both = opener.all_open(interval={"every": 10, "at_end": True})
    training = Training(both, last=17)
    training.run()
    close_all(both)
    assert committed(opener) == [[10, 17]] * 2


def test_ranks_that_ended_at_other_steps_save_no_last_one_and_say_so(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    both = opener.all_open(interval={"every": 10**6, "at_end": True})
    for rank, ckpt in enumerate(both):
        for step in range(1, 6 + rank):
            ckpt.maybe_save(step, state_of(step))
    close_all(both)
    assert committed(opener) == [[], []]
    assert "rank 1 ended at step 6, rank 0 at step 5" in caplog.text


def test_a_rank_that_ended_by_an_exception_keeps_the_last_step_of_all_from_being_saved(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    both = opener.all_open(interval={"every": 10**6, "at_end": True})

    def end(rank: int) -> None:
        with both[rank] as ckpt:
            ckpt.maybe_save(1, state_of(1))
            if rank == 1:
                raise ZeroDivisionError

    outcomes = on_all([lambda r=r: end(r) for r in range(2)])  # type: ignore[misc]
    assert outcomes[0] is None
    assert isinstance(outcomes[1], ZeroDivisionError)
    assert committed(opener) == [[], []]
    assert "rank 1: it ended by ZeroDivisionError" in caplog.text


# The announcements alone -------------------------------------------------------------------------


def test_steps_are_announced_a_second_ahead_and_one_step_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announced_steps, "AHEAD_S", 1.0)
    with network(["a"]) as (alone,):
        steps = AnnouncedSteps(
            alone.message_tree, run_aside=lambda f: f(), leave_out=lambda s, e: None
        )
        assert [steps.lead_steps(pace_s) for pace_s in (0.0, 0.01, 0.4, 30.0)] == [1, 100, 3, 1]
