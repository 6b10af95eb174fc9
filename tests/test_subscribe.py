"""Subscribers and callbacks of an open run: every event once, in order, and no slow one holds anything up."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import state_of, wait_until
from tests.test_bad_input import in_a_child
from tierfall.errors import ConfigError
from tierfall.telemetry import journal, subscribers

MakeConfig = Callable[..., dict[str, Any]]
Events = list[dict[str, Any]]
PATIENCE_S = 20.0


def test_a_subscriber_gets_what_the_log_has(make_config: MakeConfig, tmp_path: Path) -> None:
    path, seen = tmp_path / "events.jsonl", Events()
    with tierfall.open(make_config(events=str(path))) as ckpt:
        ckpt.subscribe(seen.append)
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2), block=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["kind"] == "opened", "before there was a subscriber"
    assert seen == lines[1:]
    assert seen[-1]["kind"] == "closed"
    assert {"run": "run", "rank": 0, "format": 1}.items() <= seen[0].items()


def test_without_a_log_too_and_each_its_own_dict(make_config: MakeConfig) -> None:
    one, two = Events(), Events()

    def spoils(event: dict[str, Any]) -> None:
        one.append(dict(event))
        event.clear()

    with tierfall.open(make_config()) as ckpt:
        ckpt.subscribe(spoils)
        ckpt.subscribe(two.append)
        ckpt.save(1, state_of(1), block=True)
    assert [event["kind"] for event in one].count("committed") == 1
    assert one == two


def test_after_unsubscribing_nothing_comes(make_config: MakeConfig) -> None:
    first, second = Events(), Events()
    with tierfall.open(make_config()) as ckpt:
        unsubscribe = ckpt.subscribe(first.append)
        ckpt.subscribe(second.append)
        ckpt.save(1, state_of(1), block=True)
        wait_until(lambda: any(e["kind"] == "committed" for e in first), "the commit of step 1")
        unsubscribe()
        unsubscribe()
        ckpt.save(2, state_of(2), block=True)
    assert {event.get("step") for event in first} == {1}
    assert {event.get("step") for event in second} == {1, 2, None}
    unsubscribe()


def test_a_raising_subscriber_gets_the_next_event(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def fails(event: dict[str, Any]) -> None:
        seen.append(event["kind"])
        raise ValueError(f"no {event['kind']}")

    with tierfall.open(make_config()) as ckpt:
        ckpt.subscribe(fails)
        ckpt.save(1, state_of(1), block=True)
    assert seen[-1] == "closed"
    assert len([r for r in caplog.records if "a callback failed" in r.message]) == len(seen)


def test_a_hanging_subscriber_holds_up_neither_saves_nor_flushes_nor_close(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "CLOSE_S", 0.1)
    release, other = threading.Event(), Events()
    try:
        with tierfall.open(make_config()) as ckpt:
            ckpt.subscribe(lambda event: release.wait(PATIENCE_S))
            ckpt.subscribe(other.append)
            for step in range(1, 4):
                ckpt.save(step, state_of(step), block=True)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert [e["step"] for e in other if e["kind"] == "committed"] == [1, 2, 3]
        assert "events: it is slow" in caplog.text
    finally:
        release.set()


def test_events_that_a_slow_subscriber_loses_are_counted_logged_and_told(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = subscribers.Subscriber
    monkeypatch.setattr(journal, "Subscriber", lambda *a, **k: real(*a, **k, waiting_max=3))
    release, seen = threading.Event(), Events()

    def slow(event: dict[str, Any]) -> None:
        release.wait(PATIENCE_S)
        seen.append(event)

    with tierfall.open(make_config()) as ckpt:
        ckpt.subscribe(slow)
        for step in range(1, 6):
            ckpt.save(step, state_of(step), block=True)
        lost = ckpt.metrics_dict()["tierfall/unread_events"]
        assert lost >= 5
        release.set()
        wait_until(lambda: any(e["kind"] == "events_lost" for e in seen), "the count")
        (report,) = [event for event in seen if event["kind"] == "events_lost"]
        assert report["count"] == lost
        ckpt.save(6, state_of(6), block=True)
    assert [e["step"] for e in seen if e["kind"] == "save_begun"] == [1, 6]
    assert len([r for r in caplog.records if "is slow: 3 events wait for it" in r.message]) == 1


def test_what_is_no_function_of_an_event_is_refused(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        with pytest.raises(ConfigError, match="subscribe: 'log' is no function"):
            ckpt.subscribe("log")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"expected \(event\)"):
            ckpt.subscribe(lambda: None)  # type: ignore[misc,arg-type]
    with pytest.raises(ConfigError, match="closed"):
        ckpt.subscribe(print)


def test_a_forked_child_gets_no_events_and_may_end_as_it_likes(make_config: MakeConfig) -> None:
    seen = Events()
    with tierfall.open(make_config()) as ckpt:
        unsubscribe = ckpt.subscribe(seen.append)
        handle = ckpt.save(1, state_of(1), block=True)
        for call in (
            lambda: ckpt.subscribe(print),
            ckpt.metrics_dict,
            lambda: handle.add_done_callback(print),
        ):
            assert in_a_child(call).startswith("ConfigError: "), "each names the process"
        assert in_a_child(unsubscribe) == ""
        ckpt.save(2, state_of(2), block=True)
    assert [e["step"] for e in seen if e["kind"] == "committed"] == [1, 2]


# Callbacks of a real save ----------------------------------------------------------------------------


def test_a_callback_comes_on_its_own_thread_once_the_last_tier_has_it(
    make_config: MakeConfig,
) -> None:
    made: queue.SimpleQueue[tuple[int, str, bool]] = queue.SimpleQueue()

    def note(handle: tierfall.SaveHandle) -> None:
        made.put((handle.step, threading.current_thread().name, handle.done()))

    with tierfall.open(make_config(near={}, far={})) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).add_done_callback(note)
        for step in (1, 2):
            assert made.get(timeout=PATIENCE_S) == (step, "tierfall-run-callbacks", True)


def test_close_calls_back_for_what_it_leaves_behind(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    config = make_config(disk={}, slow={"bandwidth": "1kB/s"}) | {"max_wait": "0.3s"}
    with tierfall.open(config) as ckpt:
        handle = ckpt.save(1, state_of(1))
        handle.add_done_callback(lambda handle: made.append(str(handle.exception())))
    (reason,) = made
    assert "the run was closed before this was done" in reason
    later = threading.Event()
    handle.add_done_callback(lambda handle: later.set(), "disk")
    assert later.wait(PATIENCE_S), "a handle of a closed run still calls back"


def test_a_callback_that_hangs_does_not_keep_close(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    try:
        with tierfall.open(make_config()) as ckpt:
            handle = ckpt.save(1, state_of(1), block=True)
            handle.add_done_callback(lambda handle: release.wait(PATIENCE_S))
            began_s = time.monotonic()
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    finally:
        release.set()
