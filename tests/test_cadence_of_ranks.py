"""Several ranks save the same steps by a cadence that rank 0 decides, even if they are at different steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.ranks.threads import on_all
from tests.open_ranks import SOON_S, Opener, close_all
from tests.steps import state_of, wait_until
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.values import SaveOutcome
from tierfall.run import cadence
from tierfall.run.checkpointer import Checkpointer

STEP_S = 0.004


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between threads take no second."""
    monkeypatch.setattr(cadence, "AHEAD_S", 0.2)


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


@pytest.mark.parametrize("signalled", [(1,), (0, 1)])
def test_a_signal_to_any_rank_saves_one_step_of_all(
    opener: Opener, signalled: tuple[int, ...]
) -> None:
    both = opener.all_open(interval={"every": 10**6, "at_end": False})
    training = Training(both, last=100)
    for rank in signalled:
        training.before_step[rank, 10] = lambda r=rank: both[r]._cadence.request("SIGTERM")  # type: ignore[misc]
    training.run()
    mine, others = training.saved
    assert len(mine) == 1
    assert list(mine) == list(others)
    assert next(iter(mine)) > 10
    close_all(both)
    assert committed(opener) == [list(mine)] * 2


# The last step -----------------------------------------------------------------------------------


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


def test_a_rank_that_receives_too_late_gives_the_step_up_for_all_at_once_and_receives_earlier_from_then_on(
    opener: Opener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is always 30 steps ahead of rank 0: what rank 0 announces it has passed, the first time."""
    monkeypatch.setattr(cadence, "AHEAD_S", 0.0)
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
