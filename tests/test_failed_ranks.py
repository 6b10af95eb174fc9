"""A training that fails on one of several ranks: its error is seen at once, though the others are in a collective."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.core.ranks.threads import on_all
from tests.open_ranks import SOON_S, Opener, kill_all
from tests.steps import state_of
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.ranks.ranks import Ranks
from tierfall.run import closing


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at_end", [True, False])
def test_a_rank_that_fails_waits_for_its_own_copies_and_for_no_other_rank(
    opener: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: int,
    at_end: bool,
) -> None:
    """The copies of the last save are finished once it has failed."""
    failed, left = threading.Event(), threading.Event()
    real = PosixBackend.create

    def create(backend: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith(".safetensors"):
            assert failed.wait(SOON_S)
        return real(backend, key, **options)

    monkeypatch.setattr(PosixBackend, "create", create)
    monkeypatch.setattr(
        closing, "FAILED_S", 60.0
    )  # so that a wait for the other is longer than SOON_S
    interval = {"every": 10**6, "at_end": at_end}
    both = opener.all_open(interval=interval, max_wait="60s")

    def train(rank: int) -> None:
        if rank != failing:
            both[rank].save(1, state_of(1))
            assert left.wait(SOON_S), "in a collective, until the launcher kills it"
            return
        with both[rank] as ckpt:
            ckpt.save(1, state_of(1)).captured()
            failed.set()
            raise ZeroDivisionError

    def train_and_leave(rank: int) -> None:
        try:
            train(rank)
        finally:
            if rank == failing:
                left.set()

    outcomes = on_all([lambda r=r: train_and_leave(r) for r in range(2)])  # type: ignore[misc]
    kill_all([both[1 - failing]])
    assert isinstance(outcomes[failing], ZeroDivisionError)
    assert outcomes[1 - failing] is None
    assert len([*opener.folder.glob("*/far/run/step-*/commit.json")]) == 2
    assert "did not call" not in caplog.text
    assert "gave no answer" not in caplog.text
