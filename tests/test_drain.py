"""Drain towards a deadline, by a call and by a signal: the forecast matches what is flushed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import on_all
from tests.open_ranks import Opener, close_all, wait_sealed
from tests.steps import state_of, steps_on, wait_until
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.values import SaveOutcome
from tierfall.run.session import Session

MakeConfig = Callable[..., dict[str, Any]]
ELEMENTS = 200_000
"""An image of 0.86 MB: a second at 860 kB/s."""


def large(step: int) -> dict[str, Any]:
    return state_of(step, elements=ELEMENTS)


# Signals ---------------------------------------------------------------------------------------------


def test_signals_are_let_go_of_at_the_close_and_may_be_listened_to_again(
    make_config: MakeConfig,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    config = make_config()
    config["drain"] = {"on_signal": ["SIGUSR1"]}
    for _ in range(2):
        with tierfall.open(config, fresh=True) as ckpt:
            assert signal.getsignal(signal.SIGUSR1) is not before
            ckpt.save(1, state_of(1))
        assert signal.getsignal(signal.SIGUSR1) is before


def test_no_signal_is_listened_to_before_the_run_has_begun_or_after_an_open_that_failed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begins = signal.getsignal(signal.SIGUSR1), Session.start
    found = []

    def start(session: Session, *given: Any) -> None:
        found.append(signal.getsignal(signal.SIGUSR1))
        begins(session, *given)

    def refuse(*given: Any) -> None:
        raise OSError("no thread")

    monkeypatch.setattr(Session, "start", start)
    monkeypatch.setattr("tierfall.run.closing.DrainOnSignal", refuse)
    with pytest.raises(OSError, match="no thread"):
        tierfall.open(saving_on_signal(make_config()))
    assert found == [before]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.fixture
def called(make_config: MakeConfig) -> Iterator[threading.Event]:
    """Set by the user's handler, which a drain on SIGUSR1 lets run once it is over."""
    called = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.set())
    yield called
    signal.signal(signal.SIGUSR1, before)


def saving_on_signal(config: dict[str, Any]) -> dict[str, Any]:
    """One signal asks for a save and for a drain, whose deadline no test waits for."""
    config["interval"] = {"every": 10**6, "on_signal": ["SIGUSR1"]}
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "10m"}
    return config


def test_a_save_that_the_signal_asks_for_is_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    """One signal asks for a save at the next step, and for a drain, which takes that save along."""
    with tierfall.open(saving_on_signal(make_config())) as ckpt:
        ckpt.save(1, state_of(1))
        assert ckpt.maybe_save(2, state_of(2)) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not called.wait(0.5), "it was over before the save"
        handle = ckpt.maybe_save(3, state_of(3))
        assert handle is not None
        wait_until(called.is_set, "the drain is over")
        assert handle.done("disk")


def test_a_save_that_the_signal_asks_for_and_that_is_skipped_is_not_waited_for(
    make_config: MakeConfig, called: threading.Event
) -> None:
    host = {"capacity": "1200KiB", "when_full": "skip"}
    config = make_config(disk={"bandwidth": "900kB/s"}, host=host)
    with tierfall.open(saving_on_signal(config)) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = ckpt.maybe_save(2, large(2))
        assert handle is not None
        assert handle.outcome is SaveOutcome.SKIPPED
        wait_until(called.is_set, "the drain is over")
        assert steps_on(Path(config["tiers"][-1]["path"])) == [1]


def test_a_drain_that_meets_a_close_lets_it_end(
    make_config: MakeConfig, called: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(disk={"bandwidth": "900kB/s"}, host={"capacity": "16MiB"}, max_wait="20s")
    config["drain"] = {"on_signal": ["SIGUSR1"], "deadline": "20s"}
    with tierfall.open(config) as ckpt:
        ckpt.save(1, large(1)).captured()
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(called.is_set, "the handler was called after the close")
    assert "what was to be done on SIGUSR1 failed" not in caplog.text


# Several ranks ---------------------------------------------------------------------------------------


def slow_ranks(
    tmp_path: Path, ranks: list[Ranks], waiting: Sequence[int] = (1, 1, 1, 1)
) -> list[Any]:
    """Both ranks of a run whose tier has shown that an image takes half a second, with images that wait, each so many
    times as large."""
    opener = Opener(tmp_path, ranks)
    checkpointers = on_all(
        [
            lambda r=r: opener.open(  # type: ignore[misc]
                r,
                tiers=[
                    {
                        "name": "host",
                        "kind": "host",
                        "folder": str(tmp_path / str(r) / "memory"),
                        "capacity": "16MiB",
                    },
                    {
                        "name": "nvme",
                        "kind": "file",
                        "path": str(tmp_path / str(r) / "nvme"),
                        "bandwidth": "900kB/s",
                    },
                ],
                chunk="64KiB",
                max_wait="30s",
            )
            for r in range(2)
        ]
    )

    def save(rank: int, step: int, times: int = 1) -> Any:
        tensor = torch.full((times * ELEMENTS // 2,), float(rank))
        return checkpointers[rank].save(step, {"w": tensor, "rng": None})

    on_all([lambda r=r: save(r, 1).wait() for r in range(2)])  # type: ignore[misc]
    for step, times in enumerate(waiting, start=2):
        on_all([lambda r=r, s=step, n=times: save(r, s, n).captured() for r in range(2)])  # type: ignore[misc]
        wait_sealed(checkpointers)
    return checkpointers


def test_rank_0_plans_for_all_and_the_report_is_the_same_on_all(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    checkpointers = slow_ranks(tmp_path, ranks)
    reports = on_all([lambda c=c: c.drain(1.7) for c in checkpointers])  # type: ignore[misc]
    assert reports[0].forecast == reports[1].forecast != ()
    assert (reports[0].done, reports[0].left) == (reports[1].done, reports[1].left)
    assert [f.arrives for f in reports[0].forecast].count(False) >= 1
    done = {step for step, _, _ in reports[0].done}
    assert 5 in done or not {3, 4} & done, "the newest came before older ones"
    assert reports[0].left
    close_all(checkpointers)


def test_a_deadline_of_any_rank_is_one_for_all(tmp_path: Path, ranks: list[Ranks]) -> None:
    checkpointers = slow_ranks(tmp_path, ranks)
    coordinators = [c._session.coordinator for c in checkpointers]
    checkpointers[1]._session.call_soon(lambda: coordinators[1].drain_schedule.share(1.6))
    wait_until(lambda: coordinators[0].drain_schedule.active, "rank 0 has heard of it")
    assert not coordinators[1].drain_schedule.active, "rank 0 alone plans"
    wait_until(lambda: not coordinators[0].drain_schedule.active, "the deadline is over")
    known = {c.step: c.copies.get("nvme") for c in checkpointers[0].checkpoints()}
    # step 2 may have been begun before; how much arrives in time, if anything, is a matter of the machine
    newest = known[5]
    arrived = newest is not None and newest.state == "committed"
    assert arrived or known[3] is known[4] is None, "the newest comes first"
    close_all(checkpointers)
