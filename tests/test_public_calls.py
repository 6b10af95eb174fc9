"""Public calls: errors end at the user's line, a signal handler may make them, and a Checkpointer that no variable
holds can be closed. What a logging handler does holds up no training."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import Opener, close_all
from tests.steps import blank, refuse_threads, state_of, step_in, steps_on, wait_until
from tierfall.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    ConfigError,
    FlushError,
    RanksError,
    TierfallError,
)
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter

MakeConfig = Callable[..., dict[str, Any]]
SOON_S = 20.0


# Errors -----------------------------------------------------------------------------------------------


def raised(call: Callable[[], object]) -> TierfallError:
    with pytest.raises(TierfallError) as caught:
        call()
    return caught.value


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def frames(error: BaseException) -> list[str]:
    """Return the files of a traceback below this one."""
    return [f.filename for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]


class Mine:
    """An object whose methods fail, as a user's may."""

    def state_dict(self) -> dict[str, int]:
        raise ZeroDivisionError("of the user")

    def load_state_dict(self, state: object) -> None:
        raise ZeroDivisionError("of the user")


def test_an_error_ends_at_the_users_line_and_says_each_sentence_once(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tierfall.json").write_text("{}")
    with tierfall.open(config) as ckpt:
        handle = ckpt.save(1, state_of(1), block=True)
        calls: list[Callable[[], object]] = [
            lambda: tierfall.open(tmp_path / "nothing.yaml"),
            lambda: tierfall.open({"run": "run", "tiers": 1}),
            lambda: tierfall.open(config),
            lambda: tierfall.load(tmp_path / "nothing"),
            lambda: tierfall.load(tmp_path / "disk", step=9),
            lambda: tierfall.read_pointer(tmp_path / "damaged"),
            lambda: tierfall.read_pointer(tmp_path),
            lambda: ckpt.save(1, state_of(1)),
            lambda: ckpt.save(2, {"a": object()}),
            lambda: ckpt.restore({"b": torch.ones(3)}),
            lambda: ckpt.restore(blank(), step=9),
            lambda: ckpt.load(step=9),
            lambda: ckpt.pin(9),
            lambda: handle.wait("nowhere"),
        ]
        for call in calls:
            with caplog.at_level(logging.DEBUG, "tierfall"):
                caplog.clear()
                error = raised(call)
            assert len(frames(error)) == 1, printed(error)
            assert (error.__cause__, error.__suppress_context__) == (None, True)
            assert printed(error).count(str(error).splitlines()[0]) == 1
            assert any(r.exc_info and r.exc_info[1] is error for r in caplog.records), "at DEBUG"
    assert isinstance(raised(lambda: ckpt.save(2, state_of(2))), ConfigError)


def test_the_limit_of_processes_is_an_error_that_names_it_at_the_users_line(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "tierfall-run-status")
    error = raised(lambda: tierfall.open(make_config()))
    assert isinstance(error, CapacityError)
    assert re.match("open: .* another thread.*ulimit -u", str(error))
    assert len(frames(error)) == 1, printed(error)
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    assert isinstance(error.__context__, RuntimeError)


def test_a_wrong_argument_is_an_error_of_tierfall_that_says_what_was_expected(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    two, state = torch.tensor([1, 2]), state_of(1)
    ckpt = tierfall.open(make_config())
    ckpt.save(1, state, block=True)
    anything: Any = ckpt
    no_folder = {**make_config(disk={"path": "/dev/null/folder"}), "run": "other"}
    nothing: Any = None
    five: Any = 5
    calls: list[tuple[str, Callable[[], object]]] = [
        ("save: step must be an integer", lambda: anything.save(two, state)),
        ("save: step must be an integer", lambda: anything.maybe_save(two, state)),
        ("restore: step must be an integer", lambda: anything.restore(state, step=two)),
        ("save: tags must be a list of names", lambda: anything.save(2, state, tags=None)),
        ("save: tags must be a list of names", lambda: TierWriter(ckpt, step=2, tags=nothing)),
        ("restore: only must be a list", lambda: anything.restore(state, only=5)),
        ("restore: only must be a list", lambda: anything.restore(state, only=iter(["model"]))),
        ("restore: skip must be a list", lambda: anything.restore(state, skip=5)),
        ("restore: retype must be a list", lambda: anything.restore(state, retype=5)),
        ("restore: resize must be a list", lambda: anything.restore(state, resize=5)),
        ("load: only must be a list", lambda: anything.load(only=5)),
        ("load: only must be a list", lambda: tierfall.load(tmp_path, only=five)),
        ("load: checkpoint 1@1 has no entry named 'x'", lambda: ckpt.load(only=["x"])),
        ("load: resume is None; expected True", lambda: anything.load(resume=None)),
        ("https://x is an address", lambda: tierfall.open("https://x")),
        ("check the tier's folder", lambda: tierfall.open(no_folder)),
        ("read_pointer: folder must be a path", lambda: tierfall.read_pointer(nothing)),
        ("write_pointer: folder must be a path", lambda: anything.write_pointer(5, 1)),
        ("expected a Checkpointer", lambda: TierWriter(nothing, step=1)),
        ("expected a Checkpointer", lambda: TierReader(nothing)),
        ("expected a Checkpointer", lambda: LazyStager(nothing)),
        ("LazyStager captures for a TierWriter", lambda: LazyStager(ckpt).stage({})),
        ("None is not a type", lambda: tierfall.register_codec(nothing, "x", str, str)),
    ]
    for expected, call in calls:
        error = raised(call)
        assert expected in str(error)
        assert len(frames(error)) == 1, printed(error)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepp'") as caught:
        anything.restore(state, stepp=1)
    assert not frames(caught.value)
    ckpt.close()
    guard = ckpt.guard()
    assert len(frames(raised(guard.__enter__))) == 1


def test_the_cause_of_an_error_is_its_context(tmp_path: Path) -> None:
    error = raised(lambda: tierfall.read_pointer(tmp_path))
    assert isinstance(error.__context__, FileNotFoundError)


def test_an_error_of_the_users_code_keeps_its_traceback(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        error = raised(lambda: ckpt.save(1, {"mine": Mine()}))
        assert isinstance(error, CaptureError)
        assert len(frames(error)) == 1
        for words in ("in state_dict", "raise ZeroDivisionError", "ZeroDivisionError: of the user"):
            assert words in printed(error)
        assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_handle_keeps_the_original_exception(
    make_config: MakeConfig, tmp_path: Path, on_error: str
) -> None:
    """Whatever raises it, and how often."""
    (tmp_path / "disk").mkdir()
    config = make_config(max_wait="1s", on_error=on_error)
    ckpt = tierfall.open(config)
    (tmp_path / "disk" / "run").rename(tmp_path / "gone")
    (tmp_path / "disk" / "run").write_text("in its way")
    handle = ckpt.save(1, state_of(1))
    for _ in range(2):
        error = raised(lambda: handle.wait(timeout=SOON_S))
        assert isinstance(error, FlushError)
        assert len(frames(error)) == 1
        original = handle.exception()
        assert error.__context__ is original
        assert isinstance(original, FlushError)
        assert isinstance(original.__cause__, BackendError)
    if on_error == "raise":
        failure = raised(lambda: ckpt.save(2, state_of(2)))
        assert failure is handle.exception() is original
        assert len(frames(failure)) == 1
        assert isinstance(failure.__context__, BackendError)
    with suppress(FlushError):
        ckpt.close()


# Signal handlers --------------------------------------------------------------------------------------


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], list[object]]]:
    """``on_signal(call)``: make a call at each SIGUSR1; what it returned or raised is added to the list."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(call: Callable[[], object]) -> list[object]:
        found: list[object] = []

        def handler(number: int, frame: FrameType | None) -> None:
            try:
                found.append(call())
            except TierfallError as error:
                found.append(error)

        signal.signal(signal.SIGUSR1, handler)
        return found

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGUSR1, before)


class Signals:
    """An object whose state is asked for within a save, and read within a restore."""

    def state_dict(self) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"a": 1}

    def load_state_dict(self, state: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


def test_calls_that_read_a_run_work_in_a_signal_handler_at_any_moment(
    make_config: MakeConfig, on_signal: Callable[..., list[object]]
) -> None:
    """A timer interrupts the calls of the training thread in all of their lines."""
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state_of(1), block=True)

        def look() -> tuple[object, ...]:
            handle.add_done_callback(lambda handle: None)
            return ckpt.statistics().saves, handle.stats, handle.outcome, handle.done(), repr(ckpt)

        def look_again() -> object:
            try:
                return look()
            finally:
                if len(found) < 500:
                    signal.setitimer(signal.ITIMER_REAL, 0.001)

        found = on_signal(look_again)
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGUSR1))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while len(found) < 500:
            look()
        ckpt.save(2, {**state_of(2), "signals": Signals()})
    assert [each for each in found if isinstance(each, TierfallError)] == []


def test_calls_that_change_a_run_are_refused_within_another(
    make_config: MakeConfig, on_signal: Callable[..., list[object]]
) -> None:
    with tierfall.open(make_config()) as ckpt:
        state = {**state_of(1), "signals": Signals()}
        calls: list[Callable[[], object]] = [
            lambda: ckpt.save(5, state_of(5)),
            lambda: ckpt.maybe_save(5, state_of(5)),
            lambda: ckpt.restore(blank()),
            lambda: ckpt.drain(),
            lambda: ckpt.pin(1),
            lambda: ckpt.close(),
        ]
        for number, call in enumerate(calls, 1):
            found = on_signal(call)
            assert ckpt.save(number, state).step == number
            (error,) = found
            assert isinstance(error, ConfigError)
            assert "called within save of the same thread" in str(error)
        found = on_signal(calls[0])
        assert ckpt.restore(state) is not None
        assert "called within restore" in str(found[-1])
        assert ckpt.save(9, state_of(9), block=True).done()


# A Checkpointer that nobody holds -----------------------------------------------------------------------


def lose_a_checkpointer(config: dict[str, Any]) -> None:
    """As a notebook's cell does that fails, or is run again."""
    ckpt = tierfall.open(config)
    ckpt.restore(blank())
    ckpt.save(1, state_of(1))


def test_a_checkpointer_that_no_variable_holds_is_closed_by_the_next_open_or_all_at_once(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    lose_a_checkpointer(config)
    error = raised(lambda: tierfall.open(config))
    for words in ("tierfall.close_all()", "replace=True"):
        assert words in str(error)
    with tierfall.open(config, replace=True) as ckpt:
        state = blank()
        assert ckpt.restore(state) is not None
        assert step_in(state) == 1, "what the other had saved was flushed by its close"
        assert steps_on(tmp_path / "disk") == [1]
        other = tierfall.open({**config, "run": "other"}, replace=True)
        assert "closed" not in repr(ckpt), "of another run"
        tierfall.close_all()
        assert "closed" in repr(ckpt)
        assert "closed" in repr(other)
    tierfall.close_all()
    tierfall.open(config, replace=True).close()
    with pytest.raises(ConfigError, match="replace is 1; expected True or False"):
        tierfall.open(config, replace=1)  # type: ignore[arg-type]


def test_a_close_keeps_what_another_thread_has_saved_and_refuses_the_rest(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    ckpt = tierfall.open(make_config(disk={"bandwidth": "300kB/s"}, max_wait="20s"))
    returned, errors, begun = [0], list[Exception](), threading.Event()

    def train() -> None:
        try:
            for step in range(1, 1000):
                ckpt.save(step, {**state_of(step), "more": torch.zeros(20_000)})
                returned.append(step)
                begun.set()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert begun.wait(SOON_S)
    tierfall.close_all()
    thread.join(SOON_S)
    assert re.search("closes this Checkpointer|is closed; open another one", str(errors[0]))
    assert returned[-1] in steps_on(tmp_path / "disk")


def test_close_all_closes_the_others_where_one_fails(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(on_error="raise", max_wait="1s")
    ckpt = tierfall.open(config)
    (tmp_path / "disk" / "run").rename(tmp_path / "gone")
    (tmp_path / "disk" / "run").write_text("in its way")
    raised(lambda: ckpt.save(1, state_of(1), block=True))
    other = tierfall.open({**make_config(), "run": "other"})
    assert isinstance(raised(tierfall.close_all), TierfallError)
    assert "closed" in repr(ckpt)
    assert "closed" in repr(other)


# Several ranks ------------------------------------------------------------------------------------------


def test_a_call_that_one_rank_makes_alone_fails_and_later_ones_work(tmp_path: Path) -> None:
    with network(["a", "b"], timeout_s=2.0) as ranks:
        ckpts = Opener(tmp_path, ranks).all_open()
        for handle in [c.save(1, {"w": torch.ones(4), "rng": None}) for c in ckpts]:
            handle.wait(timeout=SOON_S)
        for alone in ckpts:
            with pytest.raises(RanksError, match="pin: "):
                alone.pin(1)
            first = on_all([lambda c=c: c.unpin(1) for c in ckpts])  # type: ignore[misc]
            if first != [None, None]:  # rank 0 came before it knew that the other one had given up
                assert alone is ckpts[1]
                for error in first:
                    assert "The next call that all of them make works" in str(error)
            for _ in range(2):
                assert on_all([lambda c=c: c.pin(1) for c in ckpts]) == [None, None]  # type: ignore[misc]
        close_all(ckpts)


# Logging, and folders that are not needed -----------------------------------------------------------------


class Stopped(logging.Handler):
    """A terminal that Ctrl-S has stopped: it takes no message of another thread than the training's."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.stopped, self.taken = threading.Event(), threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.stopped.set()
            self.go_on.wait()
        self.taken.append(record.getMessage())


def test_a_log_handler_that_blocks_holds_up_no_save_and_loses_no_message(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    logger, handler = logging.getLogger("tierfall"), Stopped()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with tierfall.open(make_config(disk={"retain": {"last": 1}}, max_wait="2s")) as ckpt:
            for step in range(1, 30):
                began_s = time.monotonic()
                handle = ckpt.save(step, state_of(step))
                ckpt.wait_captured()
                handle.wait(timeout=SOON_S)
                ckpt.statistics()
                assert time.monotonic() - began_s < SOON_S
            assert handler.stopped.is_set(), "a thread of tierfall's has logged"
            logger.warning("of the training thread")
        assert steps_on(tmp_path / "disk") == [29]
        assert "of the training thread" not in handler.taken, "those before it come first"
        handler.go_on.set()
        wait_until(lambda: "of the training thread" in handler.taken, "it is taken")
    finally:
        handler.go_on.set()
        logger.removeHandler(handler)
        logger.setLevel(level)


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("no route to the log server")


def test_a_log_handler_that_raises_fails_no_call(
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger, handler = logging.getLogger("tierfall"), Broken(logging.WARNING)
    logger.addHandler(handler)
    try:
        with tierfall.open(make_config(disk={})) as ckpt:
            ckpt.save(1, state_of(1))
            logger.warning("a message")
    finally:
        logger.removeHandler(handler)
    assert steps_on(tmp_path / "disk") == [1]
    assert "no route to the log server" in capsys.readouterr().err


def test_a_program_may_have_closed_its_stderr(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    logger = logging.getLogger("tierfall")
    monkeypatch.setattr(logger, "propagate", False)  # no handler is configured
    monkeypatch.setattr(sys, "stderr", closed)
    with tierfall.open(make_config(disk={})) as ckpt:
        ckpt.save(1, state_of(1))


def test_a_run_needs_no_temporary_folder(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root, where /dev/shm and the tier's volume are writable."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    for folder in (None, str(tmp_path / "memory")):
        config = make_config(host={} if folder is None else {"folder": folder})
        with tierfall.open(config, fresh=True) as ckpt:
            ckpt.save(1, state_of(1), block=True)
    monkeypatch.setattr("tierfall.tiers.arena.folder.SHARED_MEMORY", tmp_path / "none")
    config["tiers"][0].pop("folder")
    with pytest.raises(ConfigError, match="set the host tier's `folder`"):
        tierfall.open(config)
