"""``interval`` in a training loop: its default, saves on a signal, and the last step."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests import forked
from tests.core.ranks.threads import on_all
from tests.steps import blank, state_of, steps_on
from tierfall.core.types.errors import ConfigError, UnreachableError
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test does to signals, the next one finds them as they were."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


# Signals -----------------------------------------------------------------------------------------


def test_a_handler_that_was_put_in_ours_place_stays_and_goes_on_through_ours(
    make_config: MakeConfig,
) -> None:
    told: list[str] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append("first"))
    with tierfall.open(
        {**make_config(), "interval": {"every": 10**6, "on_signal": ["SIGUSR1"]}}
    ) as ckpt:
        ours = signal.getsignal(signal.SIGUSR1)
        assert callable(ours)

        def theirs(number: int, frame: Any) -> None:
            told.append("theirs")
            ours(number, frame)

        signal.signal(signal.SIGUSR1, theirs)
        ckpt.maybe_save(1, state_of(1))
    assert signal.getsignal(signal.SIGUSR1) is theirs
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == ["theirs", "first"]


def test_an_open_that_fails_leaves_signals_as_they_were(make_config: MakeConfig) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    config = {**make_config(), "interval": {"on_signal": ["SIGUSR2"]}}
    with tierfall.open(config):
        held = signal.getsignal(signal.SIGUSR2)
        with pytest.raises(ConfigError, match="second Checkpointer"):
            tierfall.open(config)
        assert signal.getsignal(signal.SIGUSR2) == held
    assert signal.getsignal(signal.SIGUSR2) == before


def test_signals_are_the_main_threads(make_config: MakeConfig) -> None:
    config = {**make_config(), "interval": {"on_signal": ["SIGUSR1"]}}
    (error,) = on_all([lambda: tierfall.open(config)])
    assert isinstance(error, ConfigError)
    assert "interval.on_signal: only the main thread" in str(error)
    before = signal.getsignal(signal.SIGUSR1)
    ckpt = tierfall.open(config)
    assert on_all([ckpt.close]) == [None]
    assert signal.getsignal(signal.SIGUSR1) != before


CHILD = """
import os, signal, sys, time, tierfall
ready, tell = os.pipe()
tiers = [
    {"name": "host", "kind": "host", "folder": sys.argv[1] + "/memory"},
    {"name": "disk", "kind": "file", "path": sys.argv[1] + "/disk"},
]
with tierfall.open({"run": "x", "tiers": tiers, "interval": {"on_signal": ["SIGTERM"]}}) as ckpt:
    child = os.fork()
    if child == 0:
        os.write(tell, b".")
        time.sleep(60)
        os._exit(7)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print("child", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    ckpt.save(1, {"a": 1})
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_forked_child_ends_by_the_signal_and_so_does_the_program_after_close(
    tmp_path: Path,
) -> None:
    done = forked.run(["-c", CHILD, str(tmp_path)])
    assert done.stdout.splitlines() == [f"child {signal.SIGTERM:d}", "still here"], done.stderr
    assert done.returncode == -signal.SIGTERM


# The last step -----------------------------------------------------------------------------------


def at_end(make_config: MakeConfig, **more: Any) -> dict[str, Any]:
    tiers = {"near": {}, "far": {"flush": {"every": 10}}}
    return {**make_config(**tiers), "interval": {"every": 4, "at_end": True}, **more}


def test_what_close_has_no_time_to_flush_the_next_start_brings_to_every_tier(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    real = StoredTier.create_shard

    def create(self: StoredTier, *args: Any) -> Any:
        if self.name == "far":
            raise UnreachableError("far: nobody answers")
        return real(self, *args)

    config = at_end(make_config, max_wait="1s")
    with monkeypatch.context() as patch:
        patch.setattr(StoredTier, "create_shard", create)
        with tierfall.open(config) as ckpt:
            for step in range(1, 7):
                ckpt.maybe_save(step, state_of(step))
    assert steps_on(tmp_path / "far") == []
    with tierfall.open(config) as ckpt:
        assert ckpt.drain(20.0).left == ()
    assert steps_on(tmp_path / "far") == [6]


def test_nothing_is_saved_at_the_end_of_a_training_that_failed(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with tierfall.open(at_end(make_config)) as ckpt:
            ckpt.maybe_save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps_on(tmp_path / "near") == []
    assert "the last step is not saved: step 1: it ended by ZeroDivisionError" in caplog.text
    ckpt = tierfall.open(at_end(make_config))
    ckpt.maybe_save(1, state_of(1))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        ckpt.close()
    assert steps_on(tmp_path / "near") == []


def test_after_a_failure_a_step_that_was_saved_goes_where_it_was_to_go(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with tierfall.open(at_end(make_config)) as ckpt:
            ckpt.maybe_save(4, state_of(4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps_on(tmp_path / "near") == [4]
    assert steps_on(tmp_path / "far") == []
    assert "not saved" not in caplog.text


@pytest.mark.parametrize("only", [None, ["w"]])
def test_a_state_that_was_restored_since_is_no_last_step(
    only: list[str] | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(at_end(make_config)) as ckpt:
        ckpt.save(4, state_of(4), block=True)
        state = state_of(6)
        ckpt.maybe_save(6, state)
        assert ckpt.restore(state, only=only) is not None
    assert steps_on(tmp_path / "near") == [4]


def test_a_training_without_a_step_ends_without_one(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), tierfall.open(at_end(make_config)):
        pass
    assert "last step" not in caplog.text


@pytest.mark.parametrize("end", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_training_that_was_cut_short_warns_where_a_restart_continues(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, end: type[BaseException]
) -> None:
    def train(last: int) -> None:
        with tierfall.open({**make_config(), "interval": {"every": 2}}) as ckpt:
            ckpt.restore(blank())
            for step in range(1, last + 1):
                ckpt.maybe_save(step, state_of(step))
            raise end

    def warned() -> str:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING][-1]

    with pytest.raises(end):
        train(1)
    assert warned() == "run run is closed; no tier has a checkpoint of it; a restart begins anew"
    with pytest.raises(end):
        train(3)
    last = "its newest checkpoint is 2@2, on disk; a restart continues there"
    assert warned() == f"run run is closed; {last}"
    with tierfall.open(make_config()) as ckpt:
        report = ckpt.restore(blank())
        assert report is not None
        assert (report.step, report.attempt) == (2, 2)
